"""Worlds of `python -m tests.simulation`: all services in one process, by one seed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forms import proof
from tests.partition_rule import partition_of
from tests.simulation.judge import Apart, Judge, Violated
from tests.simulation.seeds import (
    NoVerdict,
    Settings,
    count_world,
    rule_of,
    run_seed,
    shrunk,
    total,
)

SHORT = Settings(messages=20, mishaps=1.0)
EVENTFUL = "7"
"""A seed of a world with dozens of mishaps."""

BUSY = Settings(messages=20, mishaps=2.0)
"""Five of these worlds take some 25 s of a processor."""


@pytest.mark.parametrize("seed", ["11", *map(proof, ("12", "13", "14", "15"))])
def test_a_world_with_mishaps_breaks_no_rule(seed: str) -> None:
    facts = run_seed(seed, BUSY)
    assert facts["violation"] == ""
    assert facts["delivered"] >= facts["published"]
    assert facts["checks"] > 0


def test_standbys_take_the_shards_of_silent_owners() -> None:
    facts = run_seed("21", BUSY)
    assert facts["violation"] == ""
    assert facts["has_standbys"]
    assert facts["takeovers"] > 0


def test_a_mishap_can_be_left_out() -> None:
    whole = run_seed(EVENTFUL, BUSY)["mishaps"]
    left = run_seed(EVENTFUL, BUSY, whole[:1])["mishaps"]
    assert whole[:2] == [0, 1]
    assert left[0] == 1


def test_what_breaks_another_rule_is_not_a_smaller_form_of_a_world() -> None:
    # Given a world that breaks no rule, whichever mishaps are left out
    lost = {"seed": "5", "mishaps": [0], "violation": "2 messages were lost, such as []"}
    assert shrunk(lost, SHORT) == []


def test_violations_of_one_rule_are_known_by_it_whatever_else_they_say() -> None:
    first = rule_of("red leases b'0/3' again 900 ms before the end of attempt 1")
    assert first == rule_of("late leases b'2/11' again 5 ms before the end of attempt 12")
    assert first == "a queue leases … again … ms before the end of attempt …"
    lost = rule_of("3 messages were lost, such as [('all', b'0/1'), ('red', b'0/1')]")
    assert lost == "… messages were lost, such as …"
    fault = rule_of("unexpected error: Traceback:\n  File x, line 3\nAssertionError: of the test")
    assert fault == "unexpected error: AssertionError: of the test"
    assert rule_of("") == ""


def test_runs_are_counted_together(tmp_path: Path) -> None:
    facts = {"seed": "1", "steps": 1500, "violation": "", "published": 1, "delivered": 1}
    facts |= {"events": 0, "checks": 1, "story": []}
    tally = tmp_path / "worlds.jsonl"
    count_world(tally, facts, SHORT)
    count_world(tally, {**facts, "steps": 1, "violation": "a message was lost"}, BUSY)
    assert total(tally) == "2 worlds, 1,501 steps, 1 broken"
    assert '"mishaps": 2.0' in tally.read_text()


def test_a_world_that_breaks_has_no_verdict() -> None:
    with pytest.raises(NoVerdict, match="unrecognized arguments: --broken"):
        run_seed("5", SHORT, options=["--broken"])


WORLD_OF = """
from tests.simulation import __main__ as program, chance

chance.install("")
{bug}
program.main()
"""

HANDLER = """
from services.broker.rpc.consumer import ConsumerServicer
from slatemq.errors import DataLoss

async def claim(*args):
    raise {error}

ConsumerServicer.Claim = claim
"""

ROUTER = """
from libs.serving.process.exits import ExitCause
from services.router.service import RouterProcess

async def ends(self):
    return ExitCause.failed("routing ended")

RouterProcess.wait_fatal = ends
"""

DECISION = """
from libs.access.policy import Decision, Rights

Rights.decide = lambda *args: Decision({is_permitted}, "of the test")
"""

ENDLESS = """
from tests.simulation import run

run.STEPS_MAX = 100
"""


@pytest.mark.parametrize(
    ("bug", "why", "seed"),
    [
        (HANDLER.format(error="AssertionError('of the test')"), "AssertionError: of the test", 5),
        (HANDLER.format(error="DataLoss('of the test')"), "of the test", 5),
        (ROUTER, "ends: failed: routing ended", 5),
        (ENDLESS, "the world is not over after 2,001 steps", 5),
        # These worlds have access control.
        (DECISION.format(is_permitted=False), r"PermissionDenied\('of the test'\)", 1),
        # Whichever comes first: the answer to the guest, or a delivery of what it published.
        (DECISION.format(is_permitted=True), "which (no rule permits|was refused)", 1),
    ],
    ids=[
        "a handler raises",
        "a handler finds damage",
        "a service ends",
        "a world is endless",
        "all is refused",
        "all is permitted",
    ],
)
def test_a_fault_that_no_client_has_to_bear_is_a_violation(bug: str, why: str, seed: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WORLD_OF.format(bug=bug), "--seed", f"{seed}", "--messages", "20"],
        capture_output=True,
        text=True,
        check=False,
    )
    violation = json.loads(ended.stdout.splitlines()[-1])["violation"]
    assert re.search(f"{why}$", violation.splitlines()[-1]), ended.stderr


# --- The judge --------------------------------------------------------------


def judge() -> Judge:
    """One that knows of a message, which went to the queue `red`."""
    judge = Judge()
    for color in ("red", "blue"):
        judge.creating(color, "color", color)
        judge.created(color)
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
    claimed: int | None = None,
    claimed_ms: int = 0,
    tail: bytes = b"",
) -> None:
    headers = {"color": color} if color else {}
    moment = judge.now() if claimed is None else claimed
    judge.delivered_to(
        queue, key, headers, message_id, token, attempt, 2000, now_ms, moment, claimed_ms, tail
    )


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
        ({"token": "two", "now_ms": 2000}, "as attempt 1 after attempt 1"),
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


def test_a_message_that_comes_before_the_time_of_its_nack_is_a_violation() -> None:
    found = judge()
    found.ending("red", b"key", "one", is_ack=False)
    found.nacked("red", b"key", "one", nacked_ms=1000, not_before_ms=3000)
    with pytest.raises(Violated, match="1 ms before its time"):
        deliver(found, token="two", attempt=2, now_ms=2999)


def test_a_message_whose_ack_was_refused_must_come_again() -> None:
    found = judge()
    found.ending("red", b"key", "one", is_ack=True)
    assert found.missing() == []
    found.ack_refused("red", b"key", "one")
    assert found.missing() == [("red", b"key")]


def test_a_refused_ack_says_nothing_of_another_that_has_no_answer() -> None:
    found = judge()
    deliver(found, token="two", attempt=2, now_ms=2000)
    found.ending("red", b"key", "one", is_ack=True)
    found.ending("red", b"key", "two", is_ack=True)
    found.ack_refused("red", b"key", "one")
    assert found.missing() == []


def test_a_message_whose_execution_was_refused_must_come_again() -> None:
    found = pushing()
    found.refused(b"pushed")
    assert found.missing() == [("red", b"key")]


def test_commands_without_an_answer_end_a_message_only_with_their_push() -> None:
    found = pushing()
    assert found.missing() == [("red", b"key")]
    deliver(found, "blue", b"pushed", "", 8)
    assert found.missing() == []


@pytest.mark.parametrize("attempts_max", [0, 2])
def test_a_nacked_attempt_counts(attempts_max: int) -> None:
    found = judge()
    found.queues["red"].attempts_max = attempts_max
    found.ending("red", b"key", "one", is_ack=False)
    with pytest.raises(Violated, match="as attempt 1 after attempt 1"):
        deliver(found, token="two", now_ms=1500)


def test_a_redrive_counts_attempts_from_1_again() -> None:
    found = judge()
    found.queues["red"].attempts_max = 1
    redrive = found.redriving("red")
    deliver(found, token="two", now_ms=3000)
    found.done(redrive)
    deliver(found, token="three", now_ms=6000)
    with pytest.raises(Violated, match="as attempt 1 after attempt 1"):
        deliver(found, token="four", now_ms=9000)


def test_a_message_that_was_seen_before_a_purge_must_not_come_after_it() -> None:
    found = judge()
    found.publishing(b"seen", {"color": "red"}, visible_at_ms=0, now_ms=10)
    found.published(b"seen", 8)
    found.done(found.losing("red", listed=[8]))
    with pytest.raises(Violated, match="purged or deleted with it"):
        deliver(found, key=b"seen", message_id=8)


def test_a_message_that_was_purged_must_not_come_again_on_a_later_claim() -> None:
    found = judge()
    before = found.now()
    loss = found.losing("red")
    found.done(loss)
    deliver(found, token="two", attempt=2, now_ms=3000, claimed=before)
    with pytest.raises(Violated, match="purged or deleted with it"):
        deliver(found, token="three", attempt=3, now_ms=6000)
    assert found.missing() == []


def test_a_message_published_after_a_purge_must_come() -> None:
    found = judge()
    found.done(found.losing("red"))
    found.publishing(b"later", {"color": "red"}, visible_at_ms=0, now_ms=10)
    found.published(b"later", 8)
    assert found.missing() == [("red", b"later")]


def test_a_change_of_a_filter_counts_from_its_answer() -> None:
    found = judge()
    change = found.changing("blue", "color", "green")
    found.publishing(b"meanwhile", {"color": "green"}, visible_at_ms=0, now_ms=10)
    found.published(b"meanwhile", 8)
    found.done(change)
    found.publishing(b"after", {"color": "green"}, visible_at_ms=0, now_ms=10)
    found.published(b"after", 9)
    found.publishing(b"late", {"color": "blue"}, visible_at_ms=0, now_ms=10)
    found.published(b"late", 10)
    assert ("blue", b"after") in found.missing()
    assert ("blue", b"meanwhile") not in found.missing(), "by the filter before, it is not taken"
    deliver(found, "blue", b"meanwhile", "green", 8)
    with pytest.raises(Violated, match="its filter does not take"):
        deliver(found, "blue", b"late", "blue", 10)


def test_a_paused_queue_must_not_deliver() -> None:
    found = judge()
    pause = found.paused("red")
    found.publishing(b"other", {"color": "red"}, visible_at_ms=0, now_ms=10)
    with pytest.raises(Violated, match="while it is paused"):
        deliver(found, key=b"other", message_id=8)
    found.done(pause)
    deliver(found, key=b"other", message_id=8)


def pushing() -> Judge:
    """One that knows of commands which end `key` and push `pushed` to the queue `blue`."""
    found = judge()
    found.executing("red", b"key", "one", b"pushed", "blue", now_ms=1000)
    return found


def test_pushes_of_refused_commands_must_not_be_seen() -> None:
    found = pushing()
    found.refused(b"pushed")
    with pytest.raises(Violated, match="which was refused"):
        deliver(found, "blue", b"pushed", "", 8)


def test_commands_whose_push_is_seen_were_executed() -> None:
    found = pushing()
    deliver(found, "blue", b"pushed", "", 8)
    with pytest.raises(Violated, match="again after an answered ack"):
        deliver(found, token="two", attempt=2, now_ms=3000)
    with pytest.raises(Violated, match="its commands were refused"):
        found.refused(b"pushed")


def test_of_two_executions_on_a_message_one_takes_effect() -> None:
    found = pushing()
    found.executing("red", b"key", "one", b"again", "blue", now_ms=1000)
    found.executed(b"again")
    with pytest.raises(Violated, match="was finished by both again and pushed"):
        deliver(found, "blue", b"pushed", "", 8)


def test_executed_pushes_must_come() -> None:
    found = pushing()
    found.executed(b"pushed")
    assert found.missing() == [("blue", b"pushed")]


def test_a_message_moves_once() -> None:
    found = judge()
    found.creating("third", "color", "none", fed_from="red")
    found.created("third")
    with pytest.raises(Violated, match="nobody moved there"):
        deliver(found, "third", token="two")
    found.moving(b"key", "third")
    deliver(found, "third", token="two")
    with pytest.raises(Violated, match="has b'key' twice"):
        deliver(found, "third", message_id=8, token="three", now_ms=3000)
    with pytest.raises(Violated, match="again after an answered ack"):
        deliver(found, token="four", attempt=2, now_ms=3000)


def test_a_message_has_no_more_attempts_than_its_queue_allows() -> None:
    found = judge()
    found.queues["red"].attempts_max = 1
    with pytest.raises(Violated, match="attempt 2 of 1"):
        deliver(found, token="two", attempt=2, now_ms=3000)


def test_a_claim_after_an_edit_gives_what_the_edit_made() -> None:
    found = judge()
    before = found.now()
    edit = found.editing(b"key", 7, b"#new")
    deliver(found, token="two", attempt=2, now_ms=3000)
    found.edited("red", b"key", 7, edit)
    deliver(found, token="three", attempt=3, now_ms=5000, claimed=before)
    deliver(found, token="four", attempt=4, now_ms=7000, tail=b"#new")
    with pytest.raises(Violated, match="with another content than after edit 1"):
        deliver(found, token="five", attempt=5, now_ms=9000)


def test_a_publish_that_no_rule_permits_must_not_be_seen() -> None:
    found = judge()
    found.forbidden(b"key")
    with pytest.raises(Violated, match="which was refused"):
        deliver(found, token="two", attempt=2, now_ms=3000)


def test_a_payload_that_no_message_was_given_is_a_violation() -> None:
    found = judge()
    with pytest.raises(Violated, match="with another content"):
        deliver(found, token="two", attempt=2, now_ms=3000, tail=b"#rotten")


def test_what_was_cancelled_must_not_come_on_a_later_claim() -> None:
    found = judge()
    before = found.now()
    found.dropping("red", b"key")
    found.cancelled("red", b"key", 7)
    deliver(found, token="two", attempt=2, now_ms=3000, claimed=before)
    with pytest.raises(Violated, match="which was dropped or cancelled there"):
        deliver(found, token="three", attempt=3, now_ms=5000)
    assert found.missing() == []


def test_what_is_past_its_retention_must_not_come() -> None:
    found = judge()
    headers = {"color": "red"}
    found.publishing(b"brief", headers, visible_at_ms=0, now_ms=0, retention_ms=2000)
    found.published(b"brief", 8, received_ms=1000)
    assert ("red", b"brief") not in found.missing()
    deliver(found, key=b"brief", message_id=8, now_ms=4000, claimed_ms=2999)
    with pytest.raises(Violated, match="1 ms past its retention"):
        deliver(
            found, key=b"brief", message_id=8, token="two", attempt=2, now_ms=9000, claimed_ms=3001
        )


def test_clocks_that_are_apart_are_allowed_for() -> None:
    found = judge()
    found.apart = lambda *_: Apart(0, 1000)
    deliver(found, token="two", attempt=2, now_ms=1001)
    with pytest.raises(Violated, match="before the"):
        deliver(found, token="three", attempt=3, now_ms=999)


def test_a_nack_counts_by_the_clock_that_it_met_and_by_that_of_the_delivery() -> None:
    found = judge()
    found.apart = lambda *_: Apart(-3000, -3000)
    found.ending("red", b"key", "one", is_ack=False)
    found.nacked("red", b"key", "one", nacked_ms=3000, not_before_ms=8000)
    # Later its queue is on a broker whose clock is right, and 3 s ahead of the first.
    found.apart = lambda *_: Apart(-3000, 0)
    with pytest.raises(Violated, match="1 ms before its time"):
        deliver(found, token="two", attempt=2, now_ms=4999)
    # One that is behind as the first is lets nothing come earlier.
    found.apart = lambda *_: Apart(-3000, -3000)
    with pytest.raises(Violated, match="1 ms before its time"):
        deliver(found, token="two", attempt=2, now_ms=7999)


def test_a_clock_that_was_behind_after_a_nack_lets_nothing_come_earlier() -> None:
    found = judge()
    found.ending("red", b"key", "one", is_ack=False)
    found.nacked("red", b"key", "one", nacked_ms=3000, not_before_ms=8000)
    found.apart = lambda *_: Apart(-3000, 0)
    with pytest.raises(Violated, match="1 ms before its time"):
        deliver(found, token="two", attempt=2, now_ms=7999)


def test_a_move_ends_the_leases_of_its_partition_alone() -> None:
    found = judge()
    found.queues["red"].partitions_count = 2
    partition = partition_of(7, None, 2)
    found.done(found.relocating("red", 1 - partition))
    with pytest.raises(Violated, match="leases b'key' again 500 ms before"):
        deliver(found, token="two", now_ms=1500)
    found.done(found.relocating("red", partition))
    deliver(found, token="two", now_ms=1500)


@pytest.mark.parametrize("is_first_late", [True, False])
def test_a_claim_may_bring_after_a_move_what_was_leased_before_it(is_first_late: bool) -> None:
    # Given a claim that began before a move, and whose answer comes after it
    found = judge()
    found.publishing(b"late", {"color": "red"}, visible_at_ms=0, now_ms=0)
    found.published(b"late", 8)
    before = found.now()
    found.done(found.relocating("red"))
    after = found.now()

    # Then the message may come to another claim, too, as the same attempt, in either order
    first, second = (before, after) if is_first_late else (after, before)
    deliver(found, key=b"late", message_id=8, token="two", now_ms=1500, claimed=first)
    deliver(found, key=b"late", message_id=8, token="three", now_ms=1500, claimed=second)
    with pytest.raises(Violated, match="leases b'late' again 400 ms before"):
        deliver(found, key=b"late", message_id=8, token="four", now_ms=1600, claimed=after)


def redriving(flaky_ahead_ms: int) -> Judge:
    """One whose queue `rescue` gets what fails in `flaky`, by a clock 3 s behind."""
    found = judge()
    found.creating("flaky", "color", "green", attempts_max=1)
    found.created("flaky")
    found.creating("rescue", "color", "none", fed_from="flaky")
    found.created("rescue")
    ahead_ms = {"flaky": flaky_ahead_ms, "rescue": -3000}
    found.apart = lambda queue, *_: Apart(ahead_ms[queue], ahead_ms[queue])
    found.publishing(b"green", {"color": "green"}, visible_at_ms=5000, now_ms=0)
    found.published(b"green", 8)
    return found


@pytest.mark.parametrize("ahead_ms", [0, 2000, -2000])
def test_the_time_of_a_redriven_message_came_by_the_clock_where_it_failed(ahead_ms: int) -> None:
    first_ms = 5000 - ahead_ms
    deliver(redriving(ahead_ms), "rescue", b"green", "green", 9, now_ms=first_ms)
    with pytest.raises(Violated, match="1 ms before its time"):
        deliver(redriving(ahead_ms), "rescue", b"green", "green", 9, now_ms=first_ms - 1)
