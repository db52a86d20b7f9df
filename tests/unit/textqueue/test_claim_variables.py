"""What claims do with the variables that mean something: retries, error, mutex."""

from pathlib import Path

import pytest

from slatemq.textqueue import (
    DoesNotFit,
)
from tests.unit.textqueue.claims import Make, claims


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"10", b"09"),
        (b"1", b"0"),
        (b" 8", b" 7"),
        (b"03  ", b"02  "),
        (b"100", b"099"),
        (b"1" + b"0" * 5000, b"0" + b"9" * 5000),
    ],
)
def test_a_claim_counts_retries_down_with_their_width(
    path: Path, make: Make, before: bytes, after: bytes
) -> None:
    claim = make(b"-a\n\\retries=" + before + b"\n").claim()

    assert claim is not None
    assert claim.entry.get("retries") == after.decode().rstrip()
    assert path.read_bytes() == b"-a\n\\retries=" + after + b"\n"


def test_a_message_without_retries_left_becomes_an_error(path: Path, make: Make) -> None:
    # Given a message with two retries, and one behind it
    queue = make(b"-a\n\\retries=2\n\\error=        \n-b\n")

    # When both are given back
    for _ in range(2):
        claim = queue.claim()
        assert claim is not None
        assert claim.text == "a"
        claim.release()

    # Then the next claim is of the other, and the first says why
    claim = queue.claim()
    assert claim is not None
    assert claim.text == "b"
    assert path.read_bytes() == b"!a\n\\retries=0\n\\error=retries \n-b\n"


def test_what_a_worker_has_reported_of_its_error_stays_when_no_retries_are_left(
    path: Path, make: Make
) -> None:
    queue = make(b"-a\n\\retries=1\n\\error=        \n")
    claim = queue.claim()
    assert claim is not None
    claim.set_variable("error", "E-42")
    claim.release()

    assert queue.claim() is None

    assert path.read_bytes() == b"!a\n\\retries=0\n\\error=E-42    \n"


@pytest.mark.parametrize("value", [b"", b"many", "٣".encode(), b"-1"])
def test_retries_that_are_no_number_bound_nothing(path: Path, make: Make, value: bytes) -> None:
    content = b"-a\n\\retries=" + value + b"\n"

    assert make(content).claim() is not None
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("free", "width"), [(b"mutex=      ", 6), (b"MUTEX", 5), (b"MUTEX   ", 8), (b"Mutex= ", 1)]
)
def test_a_mutex_variable_shows_a_token(path: Path, make: Make, free: bytes, width: int) -> None:
    content = b"-a\n\\" + free + b"\n"
    queue = make(content)

    claim = queue.claim()

    assert claim is not None
    taken = path.read_bytes()
    assert len(taken) == len(content)
    shown = taken[:-1][-width:].decode()
    assert shown == claim.token[:width] or shown.rstrip() == ("M@" + claim.token[1:])[:width]
    claim.release()
    assert path.read_bytes() == content


def test_a_variable_too_short_to_be_freed_is_no_mutex(path: Path, make: Make) -> None:
    queue = make(b"-a\n\\M@x\n")

    claim = queue.claim()
    assert claim is not None
    claim.done()

    assert path.read_bytes() == b"=a\n\\M@x\n"
    assert queue.claimed_offsets() == frozenset()


@pytest.mark.parametrize("name", [b"joe  ", b"j@b.de", b"M@ude"])
def test_a_message_that_a_person_took_is_left_to_them(make: Make, name: bytes) -> None:
    # Given a message into whose mutex variable a person has written a name
    queue = make(b"-a\n\\mutex=" + name + b"\n-b\n")

    assert claims(queue) == ["b"]
    # When they take it out, it is given to whoever asks
    queue.set_variable(queue.entry(0), "mutex", "")
    assert claims(queue) == ["a"]


@pytest.mark.parametrize("shown", [b"mutex=@joe  ", b"M@joe"])
def test_a_token_that_no_claim_has_holds_nothing(path: Path, make: Make, shown: bytes) -> None:
    # Given what an editor brought back from before the claim ended
    queue = make(b"-a\n\\" + shown + b"\n")

    assert claims(queue) == ["a"]


def test_a_variable_is_set_under_the_claim(path: Path, make: Make) -> None:
    claim = make(b"-a\n\\step=0\n").claim()
    assert claim is not None

    claim.set_variable("step", "1")
    with pytest.raises(DoesNotFit):
        claim.set_variable("step", "10")
    claim.done()

    assert path.read_bytes() == b"=a\n\\step=1\n"
