"""Which changes of the instance's settings lose nothing, one rule for each setting that has one.

Settings without a rule may become larger and smaller: what is stored keeps what it was stored with
(`retention_s`, `dedupe_window_s`), or the least value is all that is promised
(`request_id_window_s`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from libs.serving.process.instance import InstanceSettings
from libs.serving.process.settings import check_bounds, settings_of
from slatemq.errors import FailedPrecondition, InvalidArgument


def changed(before: InstanceSettings, values: Mapping[str, int]) -> InstanceSettings:
    """The settings with these values. Raises InvalidArgument for a value out of bounds."""
    for one in settings_of(InstanceSettings):
        if one.name in values:
            try:
                check_bounds(one.metadata["setting"], values[one.name])
            except ValueError as error:
                raise InvalidArgument(
                    f"settings.{one.name}", f"{error}, not {values[one.name]}"
                ) from None
    return replace(before, **values)


def check_losses(before: InstanceSettings, after: InstanceSettings, *, accept_loss: bool) -> None:
    """Raise FailedPrecondition if something stored or promised would be lost."""
    if after.payload_bytes_max < before.payload_bytes_max:
        raise FailedPrecondition(
            "PAYLOADS_STORED",
            f"{_change('payload_bytes_max', before, after)} is refused: larger payloads may be "
            "stored, and could not be delivered any more. Make a new instance, with a root of its "
            "own, where payloads have to be smaller",
            subject="payload_bytes_max",
        )
    if not accept_loss and (losses := list(_losses(before, after))):
        names = ", ".join(name for name, _ in losses)
        raise FailedPrecondition(
            "CHANGE_LOSES",
            "; ".join(text for _, text in losses) + ". Set accept_loss if that is acceptable",
            subject=names,
        )


def lowers_delay(before: InstanceSettings, after: InstanceSettings) -> bool:
    """Whether queues may have a longer default delay than new ones could."""
    return after.max_message_delay_ms < before.max_message_delay_ms


def _losses(before: InstanceSettings, after: InstanceSettings) -> Iterator[tuple[str, str]]:
    if after.replay_window_s > 0 and not 0 < before.replay_window_s <= after.replay_window_s:
        yield (
            "replay_window_s",
            f"{_change('replay_window_s', before, after)} lets the janitor remove messages that a "
            "new queue could still start with",
        )
    if after.purge_grace_s < before.purge_grace_s:
        yield (
            "purge_grace_s",
            f"{_change('purge_grace_s', before, after)} lets messages be removed before their time "
            "where clocks differ by more than that",
        )


def _change(name: str, before: InstanceSettings, after: InstanceSettings) -> str:
    return f"{name} from {getattr(before, name)} to {getattr(after, name)}"
