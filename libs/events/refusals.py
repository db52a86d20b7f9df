"""What a backend refuses now and later."""

from __future__ import annotations

import math
import re
from typing import Final

from slatemq.errors import FailedPrecondition

_BY_RABBITMQ: Final = re.compile(r"message size \d+ is larger than .*max size (\d+)", re.ASCII)


class TooLarge(FailedPrecondition):
    """An event or task is larger than the backend takes; of several at a time it may be any.

    Attributes:
        bytes_max: What it takes, if it has said so.
    """

    def __init__(self, message: str, bytes_max: float = math.inf) -> None:
        super().__init__("TOO_LARGE", message)
        self.bytes_max = bytes_max


def bytes_max_by(text: str) -> int | None:
    """What RabbitMQ takes, by its refusal of what is larger, in any protocol; None: another one."""
    found = _BY_RABBITMQ.search(text)
    return None if found is None else int(found[1])
