"""Which changes of the instance's settings are refused, since they would lose something."""

from __future__ import annotations

import pytest

from libs.serving.instance_servicer import changed, check_losses, lowers_delay
from libs.serving.process.instance import InstanceSettings
from slatemq.errors import FailedPrecondition, InvalidArgument

BEFORE = InstanceSettings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("payload_bytes_max", BEFORE.payload_bytes_max + 1),
        ("retention_s", 1),
        ("retention_s", 0),
        ("max_message_delay_ms", 1 << 40),
        ("dedupe_window_s", 1),
        ("dedupe_window_s", 86_400),
        ("request_id_window_s", 86_400),
        ("replay_window_s", BEFORE.replay_window_s + 1),
        ("replay_window_s", 0),
        ("purge_grace_s", 61),
    ],
)
def test_a_change_that_loses_nothing_is_taken(name: str, value: int) -> None:
    after = changed(BEFORE, {name: value})

    check_losses(BEFORE, after, accept_loss=False)
    assert getattr(after, name) == value


@pytest.mark.parametrize(
    ("before", "name", "value"),
    [
        (BEFORE, "replay_window_s", BEFORE.replay_window_s - 1),
        (InstanceSettings(replay_window_s=0), "replay_window_s", 1 << 31),
        (BEFORE, "purge_grace_s", 59),
        (BEFORE, "purge_grace_s", 0),
    ],
)
def test_a_change_that_may_remove_messages_has_to_be_accepted(
    before: InstanceSettings, name: str, value: int
) -> None:
    after = changed(before, {name: value})

    with pytest.raises(FailedPrecondition) as refused:
        check_losses(before, after, accept_loss=False)

    assert (refused.value.reason, refused.value.subject) == ("CHANGE_LOSES", name)
    assert f"{name} from {getattr(before, name)} to {value}" in refused.value.message
    check_losses(before, after, accept_loss=True)


def test_smaller_payloads_are_refused_whatever_is_accepted() -> None:
    after = changed(BEFORE, {"payload_bytes_max": BEFORE.payload_bytes_max - 1})

    with pytest.raises(FailedPrecondition) as refused:
        check_losses(BEFORE, after, accept_loss=True)

    assert refused.value.reason == "PAYLOADS_STORED"


def test_a_shorter_delay_is_a_question_for_the_queues() -> None:
    assert lowers_delay(BEFORE, changed(BEFORE, {"max_message_delay_ms": 899_999}))
    assert not lowers_delay(BEFORE, changed(BEFORE, {"max_message_delay_ms": 900_000}))


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("payload_bytes_max", 0, "must be at least 1, not 0"),
        ("request_id_window_s", 599, "must be at least 600, not 599"),
        ("purge_grace_s", 86_401, "must be at most 86400, not 86401"),
        ("retention_s", -1, "must be at least 0, not -1"),
    ],
)
def test_a_value_out_of_bounds_is_named(name: str, value: int, rule: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        changed(BEFORE, {name: value})

    assert (refused.value.field, refused.value.description) == (f"settings.{name}", rule)
