"""What the command advises after an error."""

from __future__ import annotations

import pytest

from slatemq.cli.failures import advice, sentence
from slatemq.encryption import KeyRing, new_key
from slatemq.errors import DataLoss, DeadlineExceeded, InvalidArgument, Unavailable


def test_another_key_of_the_same_id_is_not_taken_for_damage_in_the_store() -> None:
    payload, headers = KeyRing({"a": new_key()}, "a").seal(b"x")

    with pytest.raises(DataLoss) as caught:
        KeyRing({"a": new_key()}, "a").open(payload, headers, "")

    assert advice(caught.value) == "compare the key of this ID with the one that its sender has"
    assert advice(DataLoss("lost", reason="DAMAGED_DATA")).startswith("stored bytes are damaged")


def test_a_call_that_only_reads_is_not_said_to_have_happened() -> None:
    assert advice(DeadlineExceeded("no answer")).startswith("if it was to change something")
    pending = DeadlineExceeded("task_1 is still pending", reason="TASK_PENDING")
    assert advice(pending) == "`slatemq task pending` shows the error of its last attempt"


def test_a_setting_of_the_instance_is_named_as_it_was_typed() -> None:
    error = InvalidArgument("settings.payload_bytes_max", "must be at least 1, not 0")
    assert sentence(error) == "payload_bytes_max: must be at least 1, not 0"


def test_a_process_that_is_down_is_to_be_started() -> None:
    error = Unavailable("broker 0 at 127.0.0.1:4567 cannot be reached: …", reason="NOT_CONNECTED")
    assert advice(error).startswith("start the process, or retry once it is up")
