"""What a trigger of a ScaledObject asks, by its metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, get_args

from slatemq.errors import InvalidArgument

Mode = Literal["depth", "age", "rate"]

MODES: Final[tuple[Mode, ...]] = get_args(Mode)

TARGET_MIN: Final = 0.001
"""KEDA counts in thousandths."""

TARGET_MAX: Final = 1e12
"""Far above what any queue holds, and a thousandth of it still fits into KEDA's 64 bits."""

OWN: Final = frozenset({"queue", "mode", "target"})

KEDAS: Final = frozenset(
    {
        "scalerAddress",
        "enableTLS",
        "unsafeSsl",
        "caCert",
        "tlsCertFile",
        "tlsClientCert",
        "tlsClientKey",
    }
)
"""Keys that KEDA reads itself, and passes on with the others."""

FROM_ENV: Final = "FromEnv"
"""KEDA's ending of a key whose value is a variable of the workload, which it has looked up."""

_NUMBER: Final = re.compile(r"[0-9]{1,16}(\.[0-9]{1,16})?")


class Trigger(NamedTuple):
    """What to scale by.

    Attributes:
        queue_id: The queue.
        mode: What of it: messages, seconds, or messages a second.
        target: How much of that one replica is to have.
    """

    queue_id: str
    mode: Mode
    target: float

    @property
    def metric_name(self) -> str:
        """The name of the metric, which is a part of paths in Kubernetes' API.

        So it has no character of a queue's ID that cannot be one, and no capital: Kubernetes asks
        in lower case, and KEDA as the name is. Two queues may have the same: KEDA puts the number
        of the trigger before it.
        """
        return f"slatemq-{self.mode}-" + re.sub(r"[^a-z0-9_-]", "-", self.queue_id.lower())


def trigger_of(metadata: Mapping[str, str]) -> Trigger:
    """Read `scalerMetadata`. Raises InvalidArgument, which names the key."""
    values: dict[str, str] = {}
    for key, value in metadata.items():
        name = key.removesuffix(FROM_ENV)
        if name in KEDAS:
            continue
        if name not in OWN:
            raise InvalidArgument(key, "is not known: the keys are queue, mode and target")
        if name in values:
            raise InvalidArgument(key, f"{name} is stated twice")
        values[name] = value
    if not values.get("queue"):
        raise InvalidArgument("queue", "must be the ID of a queue")
    mode = values.get("mode", MODES[0])
    if mode not in MODES:
        raise InvalidArgument("mode", f"must be one of {', '.join(MODES)}, not {mode!r}")
    return Trigger(values["queue"], mode, _target(values.get("target", "")))


def _target(text: str) -> float:
    target = float(text) if _NUMBER.fullmatch(text) else 0.0
    if not TARGET_MIN <= target <= TARGET_MAX:
        raise InvalidArgument("target", f"must be a number from 0.001 to 10^12, not {text!r}")
    return target
