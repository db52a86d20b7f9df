"""The judge of histories: it fails each kind of fault, and nothing that may happen."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.judge.histories import Malformed, read
from tests.judge.parts import judge
from tests.judge.rules import NAMES

JUDGE = Path(__file__).resolve().parents[1] / "judge"

MS = 1_000_000
LEASE_MS = 1000
MINUTE_MS = 60_000


class Story:
    """Lines of a history; the clock moves by 10 ms with each, or where it is set.

    A broker whose clock is the clients' gives leases in the middle of a claim.
    """

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.now_ms = 0
        self.reason = "attempts exhausted"
        self.create("red", 'headers.color == "red"')
        self.create("jobs", 'headers.color == "job"')
        self.create("made", 'headers.color == "made"')

    def call(
        self, f: str, value: Any, result: Any = None, *, outcome: str = "ok", process: str = "a"
    ) -> None:
        for kind, said in (("invoke", value), (outcome, result or {})):
            self.now_ms += 10
            if kind != "unanswered":
                self.lines.append(
                    {
                        "time": self.now_ms * MS,
                        "process": process,
                        "type": kind,
                        "f": f,
                        "value": said,
                    }
                )

    def create(self, queue: str, text: str, **settings: Any) -> None:
        self.call("create-queue", {"queue": queue, "filter": text, "max_attempts": 3, **settings})

    def publish(self, key: str, ids: int, color: str = "red", **more: Any) -> None:
        outcome = more.pop("outcome", "ok")
        message = {"key": key, "headers": {"color": color}, **more}
        self.call("publish", {"messages": [message]}, {"ids": [ids]}, outcome=outcome)

    def claim(self, key: str, id_: int, attempt: int = 1, queue: str = "red", **more: Any) -> str:
        token = more.get("token", f"{queue}-{id_}-{attempt}-{self.now_ms}")
        message = {
            "key": key,
            "id": id_,
            "attempt": attempt,
            "token": token,
            "deadline_ms": self.now_ms + 15 + LEASE_MS,
        }
        message |= {name: more[name] for name in ("headers", "digest") if name in more}
        most = more.get("most", 1)
        asked = {"queue": queue, "max": most, "lease_ms": LEASE_MS, "wait_ms": 0}
        self.call("claim", asked, {"messages": [message]}, process="c")
        return str(token)

    def unknown_claim(self) -> None:
        self.call("claim", {"queue": "red", "lease_ms": LEASE_MS}, outcome="info", process="c")

    def ack(self, token: str, result: str = "ok") -> None:
        self.call("ack", {"tokens": [token]}, {"results": [result]}, process="c")

    def nack(self, token: str, **more: Any) -> None:
        self.call("nack", {"tokens": [token], **more}, {"results": ["ok"]}, process="c")

    def execute(self, token: str, pushed: list[str], outcome: str = "ok") -> None:
        commands = [{"do": "complete", "token": token}]
        commands += [{"do": "push", "queue": "made", "key": key} for key in pushed]
        self.call("execute", {"commands": commands}, outcome=outcome, process="w")

    def wait(self, ms: int) -> None:
        self.now_ms += ms

    def drained(self, **dead: list[int]) -> None:
        for queue in ("red", "jobs", "made"):
            left = [{"id": one, "attempt": 3, "reason": self.reason} for one in dead.get(queue, [])]
            self.call("drain", {"queue": queue}, {"dead": left})

    def write(self, folder: Path) -> Path:
        file = folder / "history.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        return file

    def faults(self, folder: Path) -> set[str]:
        """The rules that are broken."""
        return {fault.rule for fault in judge([self.write(folder)]).faults}


def everything(story: Story) -> None:
    """All that may happen to messages, with nothing wrong."""
    story.publish("m1", 1, digest="a1")
    story.ack(story.claim("m1", 1, digest="a1"))
    # Nacked with a delay; then its lease ends; then an ack of unknown outcome.
    story.publish("m2", 2)
    story.nack(story.claim("m2", 2), delay_ms=50)
    story.wait(60)
    story.claim("m2", 2, 2)
    story.wait(LEASE_MS)
    story.ack(story.claim("m2", 2, 3), "unknown")
    # A claim whose answer is lost takes an attempt.
    story.publish("m3", 3, delay_ms=100)
    story.wait(100)
    story.unknown_claim()
    story.wait(LEASE_MS)
    story.ack(story.claim("m3", 3, 2))
    # Dead, redriven, dead again.
    story.publish("m4", 4)
    for _ in range(2):
        for attempt in (1, 2, 3):
            story.nack(story.claim("m4", 4, attempt))
        story.call("redrive", {"queue": "red"}, {"moved_count": 1})
    for attempt in (1, 2, 3):
        story.nack(story.claim("m4", 4, attempt))
    # Released: the attempt does not count.
    story.publish("m5", 5)
    story.nack(story.claim("m5", 5), release=True)
    story.ack(story.claim("m5", 5))
    # A job becomes two messages; commands that are refused do nothing.
    story.publish("j1", 6, "job")
    token = story.claim("j1", 6, queue="jobs")
    story.execute(token, ["refused"], "fail")
    story.execute(token, ["j1/a", "j1/b"])
    story.ack(story.claim("j1/a", 7, queue="made"))
    story.ack(story.claim("j1/b", 8, queue="made"))
    # A publish without an answer may have happened, and one that was refused may not.
    story.publish("m6", 9, outcome="info")
    story.publish("m7", 10, outcome="fail")
    story.publish("blue", 11, "blue")
    # Paused, and claimed afterwards.
    story.call("pause", {"queue": "red"})
    story.call("resume", {"queue": "red"})
    story.publish("m8", 12)
    story.ack(story.claim("m8", 12))
    # Moved to another broker while it is leased: the attempt does not count.
    story.publish("m9", 13)
    story.claim("m9", 13)
    story.call("move", {"queue": "red"})
    story.ack(story.claim("m9", 13, headers={"color": "red"}))
    story.drained(red=[4])


def gone_after_its_retention(story: Story) -> None:
    """A dead letter whose payload the janitor has removed, as it should."""
    story.publish("m1", 1, retention_ms=LEASE_MS)
    story.claim("m1", 1)
    story.wait(2 * LEASE_MS)
    story.reason = "payload gone"
    story.drained(red=[1])


def redriven_unseen(story: Story) -> None:
    """Dead by claims without an answer, redriven, and dead again by them."""
    story.publish("m1", 1)
    story.nack(story.claim("m1", 1))
    for _ in range(2):
        story.unknown_claim()
        story.wait(LEASE_MS)
    story.call("redrive", {"queue": "red"}, {"moved_count": 1})
    story.nack(story.claim("m1", 1))
    for _ in range(2):
        story.unknown_claim()
        story.wait(LEASE_MS)
    story.call("redrive", {"queue": "red"}, {"moved_count": 1})
    for _ in range(3):
        story.unknown_claim()
        story.wait(LEASE_MS)
    story.drained(red=[1])


def kept_up(story: Story) -> None:
    """Messages that come minutes after they are due, and none of them is passed over."""
    # Nothing is served meanwhile, and what came first comes first.
    story.publish("m1", 1, delay_ms=500)
    story.publish("m2", 2)
    story.nack(story.claim("m2", 2))
    story.wait(MINUTE_MS)
    story.publish("m3", 3)
    for key, number, attempt in (("m1", 1, 1), ("m2", 2, 2), ("m3", 3, 1)):
        story.ack(story.claim(key, number, attempt, most=2))
    # The ingest of one is down, and that of the other is not.
    story.publish("m4", 4)
    story.wait(MINUTE_MS)
    story.publish("other", 1 << 48 | 5)
    story.ack(story.claim("other", 1 << 48 | 5, most=2))
    story.ack(story.claim("m4", 4, most=2))
    # The store is down, which what is in memory does not need.
    story.publish("m8", 8)
    story.call("trouble", {"what": "the store is down"}, process="store")
    story.lines[-1]["time"] += 2 * MINUTE_MS * MS
    story.wait(MINUTE_MS)
    story.publish("m9", 9)
    story.ack(story.claim("m9", 9, most=2))
    story.wait(MINUTE_MS)
    story.ack(story.claim("m8", 8, most=2))
    # An unknown claim had it, and its lease took long to end.
    story.publish("m6", 6)
    story.unknown_claim()
    story.wait(MINUTE_MS)
    story.publish("m7", 7)
    story.ack(story.claim("m7", 7, most=2))
    story.ack(story.claim("m6", 6, 2, most=2))
    story.drained()


def resumed_and_created_again(story: Story) -> None:
    """What ends a pause: a resume of unknown outcome, and the end of the queue."""
    story.call("pause", {"queue": "red"})
    story.call("resume", {"queue": "red"}, outcome="info")
    story.publish("m1", 1)
    story.ack(story.claim("m1", 1))
    story.call("pause", {"queue": "red"}, process="b")
    story.call("delete-queue", {"queue": "red"})
    story.create("red", 'headers.color == "red"')
    story.publish("m2", 2)
    story.ack(story.claim("m2", 2))
    story.drained()


def gone_meanwhile(story: Story) -> None:
    """Purged, and past its retention: no consumer may get it any more."""
    story.publish("m1", 1)
    story.call("purge", {"queue": "red"})
    story.publish("m2", 2, retention_ms=LEASE_MS)
    story.wait(2 * LEASE_MS)
    story.drained()


def dead_and_never_seen(story: Story) -> None:
    """A push of which clients know no ID, dead by claims without an answer."""
    story.publish("j1", 1, "job")
    story.execute(story.claim("j1", 1, queue="jobs"), ["p"])
    for _ in range(3):
        story.call("claim", {"queue": "made", "lease_ms": LEASE_MS}, outcome="info", process="c")
        story.wait(LEASE_MS)
    story.drained(made=[2])


def waits_of_nacks(story: Story) -> None:
    """A nack with a delay, even 0, waits for that in place of the backoff; a release for none."""
    story.create("red", 'headers.color == "red"', backoff_ms=500)
    story.publish("m1", 1)
    story.nack(story.claim("m1", 1), delay_ms=0)
    story.nack(story.claim("m1", 1, 2), release=True)
    story.nack(story.claim("m1", 1, 2))
    story.wait(500)
    story.ack(story.claim("m1", 1, 3))
    story.drained()


def acked_twice(story: Story) -> None:
    """An ack of unknown outcome that had not counted, and one that is repeated."""
    story.publish("m1", 1)
    story.ack(story.claim("m1", 1), "unknown")
    story.wait(LEASE_MS)
    token = story.claim("m1", 1, 2)
    story.ack(token)
    story.ack(token)
    story.drained()


def unanswered_edit(story: Story) -> None:
    """A filter without an answer, which comes into force after a later one."""
    blue, green = (
        {"queue": "red", "filter": f'headers.color == "{one}"'} for one in ("blue", "green")
    )
    story.call("update-queue", blue, outcome="info")
    story.call("update-queue", green, process="b")
    story.publish("m1", 1, "blue")
    story.ack(story.claim("m1", 1))
    story.publish("m2", 2, "green")
    story.drained()


def unanswered_commands(story: Story) -> None:
    """Commands of unknown outcome, each of which did all or nothing."""
    # Nothing, and their job comes again; or all.
    story.publish("j2", 20, "job")
    story.execute(story.claim("j2", 20, queue="jobs"), ["nothing"], "info")
    story.wait(LEASE_MS)
    story.ack(story.claim("j2", 20, 2, queue="jobs"))
    story.publish("j3", 21, "job")
    story.execute(story.claim("j3", 21, queue="jobs"), ["j3/a"], "info")
    story.ack(story.claim("j3/a", 22, queue="made"))
    # A job that is dead may have come to nothing.
    story.publish("j4", 23, "job")
    for attempt in (1, 2, 3):
        story.execute(story.claim("j4", 23, attempt, queue="jobs"), [f"j4/{attempt}"], "info")
        story.wait(LEASE_MS)
    story.drained(jobs=[23])


FAULTLESS = (
    everything,
    gone_after_its_retention,
    gone_meanwhile,
    dead_and_never_seen,
    redriven_unseen,
    kept_up,
    waits_of_nacks,
    acked_twice,
    resumed_and_created_again,
    unanswered_edit,
    unanswered_commands,
)


@pytest.mark.parametrize("happened", FAULTLESS)
def test_a_history_without_faults_is_passed(
    happened: Callable[[Story], None], tmp_path: Path
) -> None:
    story = Story()
    happened(story)

    assert story.faults(tmp_path) == set()


def lost(story: Story) -> None:
    story.publish("m1", 1)


def never_drained(story: Story) -> None:
    story.create("other", "true")


def from_nowhere(story: Story) -> None:
    story.ack(story.claim("ghost", 1))


def refused_and_delivered(story: Story) -> None:
    story.publish("m1", 1, outcome="fail")
    story.ack(story.claim("m1", 1))


def before_its_publish(story: Story) -> None:
    story.ack(story.claim("m1", 1))
    story.publish("m1", 1)


def foreign_headers(story: Story) -> None:
    story.publish("m1", 1)
    story.ack(story.claim("m1", 1, headers={"color": "red", "of": "another"}))


def foreign_payload(story: Story) -> None:
    story.publish("m1", 1, digest="a1")
    story.ack(story.claim("m1", 1, digest="a2"))


def dead_without_a_delivery(story: Story) -> None:
    story.publish("m1", 1)
    story.unknown_claim()
    story.drained(red=[1])


def dead_with_an_attempt_left(story: Story) -> None:
    story.publish("m1", 1)
    for attempt in (1, 2):
        story.nack(story.claim("m1", 1, attempt))
    story.drained(red=[1])


def dead_without_its_payload(story: Story) -> None:
    story.publish("m1", 1)
    for attempt in (1, 2, 3):
        story.nack(story.claim("m1", 1, attempt))
    story.reason = "payload gone"
    story.drained(red=[1])


def stored_twice(story: Story) -> None:
    story.publish("m1", 1)
    story.ack(story.claim("m1", 1))
    story.ack(story.claim("m1", 2))


def one_id_for_two(story: Story) -> None:
    story.publish("m1", 1)
    story.publish("m2", 1)
    story.ack(story.claim("m1", 1))
    story.ack(story.claim("m2", 1))


def not_its_filter(story: Story) -> None:
    story.publish("m1", 1, "blue")
    story.ack(story.claim("m1", 1))


def pushed_elsewhere(story: Story) -> None:
    story.publish("j1", 1, "job")
    story.execute(story.claim("j1", 1, queue="jobs"), ["p"])
    story.ack(story.claim("p", 2, queue="made"))
    story.ack(story.claim("p", 2, queue="red"))


def attempt_twice(story: Story) -> None:
    story.publish("m1", 1)
    story.claim("m1", 1)
    story.wait(LEASE_MS)
    story.ack(story.claim("m1", 1))


def attempts_go_back(story: Story) -> None:
    story.publish("m1", 1)
    story.unknown_claim()
    story.nack(story.claim("m1", 1, 2))
    story.ack(story.claim("m1", 1, 1))


def too_many_attempts(story: Story) -> None:
    story.publish("m1", 1)
    for attempt in (1, 2, 3):
        story.nack(story.claim("m1", 1, attempt))
    story.ack(story.claim("m1", 1, 4))


def attempt_missing(story: Story) -> None:
    story.publish("m1", 1)
    story.ack(story.claim("m1", 1, 2))


def attempt_missing_long_after_an_unknown_claim(story: Story) -> None:
    story.publish("m1", 1)
    story.unknown_claim()
    story.wait(MINUTE_MS)
    story.nack(story.claim("m1", 1))
    story.ack(story.claim("m1", 1, 3))


def two_leases(story: Story) -> None:
    story.publish("m1", 1)
    story.claim("m1", 1)
    story.wait(LEASE_MS - 100)
    story.ack(story.claim("m1", 1, 2))


def two_leases_before_a_move(story: Story) -> None:
    story.publish("m1", 1)
    story.claim("m1", 1)
    story.ack(story.claim("m1", 1, 2))
    story.call("move", {"queue": "red"})


def extension_ignored(story: Story) -> None:
    story.publish("m1", 1)
    token = story.claim("m1", 1)
    story.wait(LEASE_MS // 2)
    result = {"results": ["ok"], "deadlines_ms": [story.now_ms + 2 * LEASE_MS]}
    story.call("extend", {"tokens": [token], "lease_ms": 2 * LEASE_MS}, result, process="c")
    story.wait(LEASE_MS)
    story.ack(story.claim("m1", 1, 2))


def token_twice(story: Story) -> None:
    story.publish("m1", 1)
    story.publish("m2", 2)
    story.claim("m1", 1, token="t")
    story.ack(story.claim("m2", 2, token="t"))


def again_after_ack(story: Story) -> None:
    story.publish("m1", 1)
    story.ack(story.claim("m1", 1))
    story.wait(LEASE_MS)
    story.ack(story.claim("m1", 1, 2))


def stale_ack_counts(story: Story) -> None:
    story.publish("m1", 1)
    token = story.claim("m1", 1)
    story.wait(LEASE_MS)
    story.claim("m1", 1, 2)
    story.ack(token)


def before_its_delay(story: Story) -> None:
    story.publish("m1", 1, delay_ms=500)
    story.ack(story.claim("m1", 1))


def before_its_nack_delay(story: Story) -> None:
    story.publish("m1", 1)
    story.nack(story.claim("m1", 1), delay_ms=500)
    story.ack(story.claim("m1", 1, 2))


def before_its_backoff(story: Story) -> None:
    story.create("red", 'headers.color == "red"', backoff_ms=500)
    story.publish("m1", 1)
    story.claim("m1", 1)
    story.wait(LEASE_MS + 100)
    story.ack(story.claim("m1", 1, 2))


def before_its_backoff_after_a_nack(story: Story) -> None:
    story.create("red", 'headers.color == "red"', backoff_ms=500)
    story.publish("m1", 1)
    story.nack(story.claim("m1", 1))
    story.ack(story.claim("m1", 1, 2))


def before_its_backoff_after_an_extension(story: Story) -> None:
    story.create("red", 'headers.color == "red"', backoff_ms=500)
    story.publish("m1", 1)
    token = story.claim("m1", 1)
    result = {"results": ["ok"], "deadlines_ms": [story.now_ms + LEASE_MS]}
    story.call("extend", {"tokens": [token], "lease_ms": LEASE_MS}, result, process="c")
    story.wait(LEASE_MS + 100)
    story.ack(story.claim("m1", 1, 2))


def after_its_retention(story: Story) -> None:
    story.publish("m1", 1, retention_ms=100)
    story.wait(200)
    story.ack(story.claim("m1", 1))


def while_paused(story: Story) -> None:
    story.publish("m1", 1)
    story.call("pause", {"queue": "red"})
    story.ack(story.claim("m1", 1))
    story.call("resume", {"queue": "red"})


def paused_for_ever(story: Story) -> None:
    story.publish("m1", 1)
    story.call("pause", {"queue": "red"})
    story.call("resume", {"queue": "red"}, outcome="fail")
    story.ack(story.claim("m1", 1))


def overdue_after_its_delay(story: Story) -> None:
    story.publish("m1", 1, delay_ms=500)
    story.wait(MINUTE_MS)
    story.publish("m2", 2)
    story.ack(story.claim("m2", 2, most=2))
    story.ack(story.claim("m1", 1))


def overdue_after_its_nack(story: Story) -> None:
    story.publish("m1", 1)
    story.nack(story.claim("m1", 1), delay_ms=500)
    story.wait(MINUTE_MS)
    story.publish("m2", 2)
    story.ack(story.claim("m2", 2, most=2))
    story.ack(story.claim("m1", 1, 2))


def overdue_after_the_trouble(story: Story) -> None:
    story.call("trouble", {"what": "the store is down"}, process="store")
    story.publish("m1", 1)
    story.wait(MINUTE_MS)
    story.publish("m2", 2)
    story.ack(story.claim("m2", 2, most=2))
    story.ack(story.claim("m1", 1))


def push_without_completion(story: Story) -> None:
    story.publish("j1", 1, "job")
    story.execute(story.claim("j1", 1, queue="jobs"), ["p"], "info")
    story.ack(story.claim("p", 2, queue="made"))
    story.wait(LEASE_MS)
    story.ack(story.claim("j1", 1, 2, queue="jobs"))


def refused_push(story: Story) -> None:
    story.publish("j1", 1, "job")
    token = story.claim("j1", 1, queue="jobs")
    story.execute(token, ["p"], "fail")
    story.ack(story.claim("p", 2, queue="made"))
    story.ack(token)


def half_of_the_pushes(story: Story) -> None:
    story.publish("j1", 1, "job")
    story.execute(story.claim("j1", 1, queue="jobs"), ["p", "q"], "info")
    story.ack(story.claim("p", 2, queue="made"))


def completed_without_its_push(story: Story) -> None:
    story.publish("j1", 1, "job")
    story.execute(story.claim("j1", 1, queue="jobs"), ["p"], "info")


def task_done_twice(story: Story) -> None:
    story.publish("j1", 1, "job")
    for attempt, pushed in ((1, "p"), (2, "q")):
        story.execute(story.claim("j1", 1, attempt, queue="jobs"), [pushed], "info")
        story.ack(story.claim(pushed, attempt + 1, queue="made"))
        story.wait(LEASE_MS)


def push_lost(story: Story) -> None:
    story.publish("j1", 1, "job")
    story.execute(story.claim("j1", 1, queue="jobs"), ["p"])


def redriven_alive(story: Story) -> None:
    story.publish("m1", 1)
    story.nack(story.claim("m1", 1))
    story.call("redrive", {"queue": "red"}, {"moved_count": 1})
    story.ack(story.claim("m1", 1))


def redriven_and_gone(story: Story) -> None:
    story.publish("m1", 1)
    for attempt in (1, 2, 3):
        story.nack(story.claim("m1", 1, attempt))
    story.call("redrive", {"queue": "red"}, {"moved_count": 1})


def redriven_alive_by_one_unknown_claim(story: Story) -> None:
    story.unknown_claim()
    redriven_alive(story)


def redriven_and_not_stated(story: Story) -> None:
    story.unknown_claim()
    story.publish("m1", 1)
    for attempt in (1, 2, 3):
        story.nack(story.claim("m1", 1, attempt))
    story.call("redrive", {"queue": "red"}, {"moved_count": 0})
    story.ack(story.claim("m1", 1))


def two_redriven_and_gone_by_one_unknown_claim(story: Story) -> None:
    for number in (1, 2):
        story.publish(f"m{number}", number)
        for attempt in (1, 2, 3):
            story.nack(story.claim(f"m{number}", number, attempt))
    story.call("redrive", {"queue": "red"}, {"moved_count": 2})
    story.unknown_claim()


def redriven_twice(story: Story) -> None:
    story.publish("m1", 1)
    for attempt in (1, 2, 3):
        story.nack(story.claim("m1", 1, attempt))
    story.call("redrive", {"queue": "red"}, {"moved_count": 1})
    story.nack(story.claim("m1", 1))
    story.ack(story.claim("m1", 1))


FAULTS: list[tuple[Callable[[Story], None], str]] = [
    (lost, "lost"),
    (never_drained, "lost"),
    (push_lost, "lost"),
    (from_nowhere, "unsent"),
    (refused_and_delivered, "unsent"),
    (before_its_publish, "unsent"),
    (stored_twice, "stored-once"),
    (one_id_for_two, "stored-once"),
    (not_its_filter, "routing"),
    (pushed_elsewhere, "routing"),
    (foreign_headers, "content"),
    (foreign_payload, "content"),
    (dead_without_a_delivery, "dead"),
    (dead_with_an_attempt_left, "dead"),
    (dead_without_its_payload, "dead"),
    (attempt_twice, "attempts"),
    (attempts_go_back, "attempts"),
    (too_many_attempts, "attempts"),
    (attempt_missing, "attempts"),
    (attempt_missing_long_after_an_unknown_claim, "attempts"),
    (redriven_twice, "attempts"),
    (two_leases, "leases"),
    (two_leases_before_a_move, "leases"),
    (extension_ignored, "leases"),
    (token_twice, "leases"),
    (again_after_ack, "after-ack"),
    (stale_ack_counts, "after-ack"),
    (before_its_delay, "early"),
    (before_its_nack_delay, "early"),
    (before_its_backoff, "early"),
    (before_its_backoff_after_a_nack, "early"),
    (before_its_backoff_after_an_extension, "early"),
    (after_its_retention, "late"),
    (while_paused, "late"),
    (paused_for_ever, "late"),
    (overdue_after_its_delay, "overdue"),
    (overdue_after_its_nack, "overdue"),
    (overdue_after_the_trouble, "overdue"),
    (push_without_completion, "commands"),
    (refused_push, "commands"),
    (half_of_the_pushes, "commands"),
    (completed_without_its_push, "commands"),
    (task_done_twice, "tasks"),
    (redriven_alive, "redrives"),
    (redriven_alive_by_one_unknown_claim, "redrives"),
    (redriven_and_gone, "redrives"),
    (redriven_and_not_stated, "redrives"),
    (two_redriven_and_gone_by_one_unknown_claim, "redrives"),
]


@pytest.mark.parametrize(("fault", "rule"), FAULTS)
def test_each_kind_of_fault_is_found(
    fault: Callable[[Story], None], rule: str, tmp_path: Path
) -> None:
    story = Story()
    fault(story)
    if not any(line["f"] == "drain" for line in story.lines):
        story.drained()

    assert rule in story.faults(tmp_path)


def test_every_rule_has_a_fault_that_it_finds() -> None:
    assert {rule for _, rule in FAULTS} == set(NAMES)


def test_the_judge_imports_nothing_of_ours() -> None:
    imported = set()
    for file in JUDGE.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module or "")
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
    foreign = {name for name in imported if name.split(".")[0] not in sys.stdlib_module_names}

    assert {name.split(".")[0] for name in foreign} == {"celpy", "tests"}
    assert all(name.startswith(("celpy", "tests.judge")) for name in foreign)


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"time": 1}', '{"time": 1, "process": "a", "type": "ok", "f": "claim"}'],
)
def test_a_line_that_is_not_of_the_format_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    file.write_text(line + "\n")

    with pytest.raises(Malformed, match=r"history\.jsonl:1"):
        read([file])


def test_a_line_ends_where_json_lines_end(tmp_path: Path) -> None:
    line = {"time": 1, "process": "a\u2028b\x85", "type": "invoke", "f": "claim", "value": {}}
    file = tmp_path / "history.jsonl"
    file.write_text(json.dumps(line, ensure_ascii=False) + "\n")

    (operation,) = read([file])

    assert operation.process == line["process"]


def test_files_alone_are_judged(tmp_path: Path) -> None:
    """The command, on a history whose writer was killed in the middle of its last line."""
    story = Story()
    again_after_ack(story)
    story.drained()
    assert story.faults(tmp_path)
    file = tmp_path / "history.jsonl"
    with file.open("a") as out:
        out.write('{"time": 99')

    done = subprocess.run(
        [sys.executable, "-m", "tests.judge", str(file), "--edn", str(tmp_path / "edn")],
        cwd=JUDGE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1, done.stderr
    assert "after-ack: ('red', 1) came again as attempt 2" in done.stdout
    assert (tmp_path / "edn" / "elle.edn").exists()
