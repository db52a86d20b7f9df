"""Worlds of `python -m tests.simulation`: all services in one process, by one seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.judge import Judge, Violated
from tests.simulation.seeds import Settings, run_seed, shrunk

SHORT = Settings(messages=20, mishaps=1.0)


def test_a_seed_is_replayed_step_by_step() -> None:
    first, second = (run_seed("5", SHORT) for _ in range(2))
    assert first["violation"] == ""
    assert first["mishaps"], "nothing happened"
    assert first == second


@pytest.mark.parametrize("seed", ["11", "12"])
def test_a_world_with_mishaps_breaks_no_rule(seed: str) -> None:
    facts = run_seed(seed, SHORT)
    assert facts["violation"] == ""
    assert facts["delivered"] >= facts["published"]


def test_a_mishap_can_be_left_out() -> None:
    settings = Settings(messages=30, mishaps=2.0)
    whole = run_seed("5", settings)["mishaps"]
    left = run_seed("5", settings, whole[:1])["mishaps"]
    assert whole[:2] == [0, 1]
    assert left[0] == 1


def test_a_seed_takes_the_same_way_by_another_command_line_and_in_other_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What shrinking rests on: a mishap that is left out must be all that differs."""
    settings = Settings(messages=30, mishaps=2.0)
    first = run_seed("5", settings)
    # Other arguments and variables move all of a process's memory, beside what the system moves.
    monkeypatch.setenv("MOVES_MEMORY", "x" * 5000)
    trace = tmp_path / "trace"
    options = ["--log", "ERROR", "--trace", str(trace)]
    second = run_seed("5", settings, [9999], options)
    assert first == second
    assert len(trace.read_text().splitlines()) == first["steps"]


def test_a_world_that_breaks_no_rule_is_not_shrunk() -> None:
    assert shrunk("5", SHORT, [0]) == []


# --- The judge --------------------------------------------------------------


def judge() -> Judge:
    """One that knows of a message, which went to the queue `red`."""
    judge = Judge()
    judge.filters = {"red": ("color", "red"), "blue": ("color", "blue")}
    judge.publishing(b"key", {"color": "red"}, visible_at_ms=500, now_ms=0)
    judge.published(b"key", 7)
    deliver(judge)
    return judge


def deliver(
    judge: Judge,
    queue: str = "red",
    key: bytes = b"key",
    color: str = "red",
    message_id: int = 7,
    token: str = "one",
    attempt: int = 1,
    now_ms: int = 1000,
) -> None:
    headers = {"color": color}
    judge.delivered_to(queue, key, headers, message_id, token, attempt, 2000, now_ms)


def test_what_may_happen_is_no_violation() -> None:
    found = judge()
    deliver(found, token="two", attempt=2, now_ms=2000)
    assert found.missing() == [("red", b"key")]
    found.ending("red", b"key", "two", is_ack=True)
    assert found.missing() == []
    found.acked_by("red", b"key")
    assert (found.delivered, found.redelivered, found.acked) == (2, 1, 1)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"key": b"other"}, "nobody published"),
        ({"color": "blue"}, "other headers"),
        ({"queue": "blue"}, "its filter does not take"),
        ({"message_id": 8, "now_ms": 2000}, "is 2 messages"),
        ({"now_ms": 2000}, "one lease of b'key' twice"),
        ({"token": "two", "attempt": 2}, "leases b'key' again 1000 ms before"),
        ({"token": "two", "now_ms": 2000}, "after a later one"),
        ({"token": "two", "attempt": 2, "now_ms": 499}, "1 ms before its time"),
    ],
)
def test_what_must_not_happen_is_a_violation(given: dict[str, object], why: str) -> None:
    found = judge()
    with pytest.raises(Violated, match=why):
        deliver(found, **given)  # type: ignore[arg-type]


def test_a_message_that_comes_again_after_its_ack_is_a_violation() -> None:
    found = judge()
    found.ending("red", b"key", "one", is_ack=True)
    found.acked_by("red", b"key")
    with pytest.raises(Violated, match="again after an answered ack"):
        deliver(found, token="two", attempt=2, now_ms=3000)
