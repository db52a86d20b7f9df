"""What must hold of a history, from the definitions in README and docs/.

A thing comes after another for certain where it began after the other ended. Nothing is judged that
could be otherwise: what is not known to have happened may have, at any time since it began.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tests.judge.facts import Copy, Dead, Delivery, Facts, Filter, Queue, Sent
from tests.judge.filters import takes
from tests.judge.histories import FAIL, INFO, NEVER, OK, Operation
from tests.judge.whole import LOG_BITS, SPANNING, Late, Spanning, Whole, place_in_log

NS: Final = 1_000_000
"""Nanoseconds of a millisecond."""

UNKNOWN_NS: Final = 60_000 * NS
"""A claim of unknown outcome has taken effect so long after it began, or never does."""

OVERDUE_NS: Final = 30_000 * NS
"""How long what is due may be passed over; by no clock is it longer than a few seconds."""

UNREADABLE: Final = ("payload gone", "payload damaged")
"""Reasons of dead letters that are lost: docs/how-to/dead-letters.md."""

YES, NO, MAYBE = "yes", "no", "maybe"


@dataclass(frozen=True)
class Fault:
    """What should not have happened, and the rule that says so."""

    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


class Judge:
    """The rules over the messages of a history, or over a part of them.

    A part has all operations on its messages and on all queues, and all messages that an ID, a
    token or commands connect with them.
    """

    def __init__(self, facts: Facts, whole: Whole | None = None) -> None:
        """`whole`: what facts of a part do not say; None: these are all."""
        self.facts = facts
        self._whole = Whole.of(facts) if whole is None else whole
        self._queues = dict(facts.queues)
        self._filters_of: dict[str, FiltersInTime] = {}
        self._redrives_of: dict[str, RedrivesInTime] = {}
        self._early_ns = facts.ahead_ms * NS

    def faults(self) -> list[Fault]:
        """All faults of these messages, rule by rule."""
        found = []
        for name, rule in RULES.items():
            found += [Fault(name, text) for text in rule(self)]
        return found

    def add_to(self, spanning: Spanning) -> None:
        """Add what is judged only when all messages are known."""
        spanning.queues = self._queues
        self._note_order(spanning)
        self._note_redrives(spanning)

    # --- Total queue --------------------------------------------------------

    def lost(self) -> Iterator[str]:
        """What was answered comes to every queue that it is for, until it is done or dead."""
        settled = self._settled()
        for queue in self.facts.queues.values():
            if not queue.drained_at:
                continue
            for key, each in self.facts.sent.items():
                for sent in each:
                    if (queue.name, key) not in settled and self.must_come(queue, key, sent):
                        yield f"{queue.name} lost {key}, which was answered"

    def must_come(self, queue: Queue, key: str, sent: Sent) -> bool:
        """Whether a message comes to a queue for certain, and stays until it is done or dead."""
        if sent.outcome != OK or sent.retention_ms or sent.ended > queue.drained_at:
            return False
        if not self.facts.ids.get(key) and queue.name in self._whole.unknown_dead:
            return False  # It may be one of these.
        return self.belongs(queue, sent) == YES

    def _settled(self) -> set[tuple[str, str]]:
        """Queue and key of each copy that is done, may be done, or is a dead letter."""
        settled = {
            (each[0].queue, each[0].key)
            for each in self.facts.deliveries.values()
            if any(
                use.finishes and use.outcome != FAIL
                for one in each
                for use in self.facts.uses[one.token]
            )
        }
        keys = {one: key for key, ids in self.facts.ids.items() for one in ids}
        for queue in self.facts.queues.values():
            settled |= {(queue.name, keys.get(dead, "")) for dead in queue.dead}
        return settled

    def unsent(self) -> Iterator[str]:
        """Nothing comes that no client sent, nor what was refused."""
        for (queue, message_id), each in self.facts.deliveries.items():
            for key in {one.key for one in each}:
                sent = self.facts.sent.get(key, [])
                if not sent:
                    yield f"{queue} delivered {message_id} ({key}), which was never sent"
                elif all(one.outcome == FAIL for one in sent):
                    yield f"{queue} delivered {key}, which was refused"
                elif min(one.ended for one in each) < min(one.began for one in sent):
                    yield f"{queue} delivered {key} before it was sent"

    def content(self) -> Iterator[str]:
        """A message comes with the headers and the payload that it was sent with."""
        for (queue, message_id), each in self.facts.deliveries.items():
            for one in each:
                sent = self.facts.sent.get(one.key, ())
                headers = [dict(known.headers) for known in sent]
                if headers and one.headers is not None and dict(one.headers) not in headers:
                    yield f"{queue} delivered {message_id} ({one.key}) with {dict(one.headers)}"
                digests = {known.digest for known in sent} - {""}
                if digests and one.digest and one.digest not in digests:
                    yield f"{queue} delivered {message_id} ({one.key}) with another payload"

    def dead(self) -> Iterator[str]:
        """A dead letter was failed by its consumer, or had all its attempts; it can be read."""
        for queue in self.facts.queues.values():
            for one in queue.dead.values():
                text = f"{queue.name} has the dead letter {one.message_id} of attempt {one.attempt}"
                if one.reason in UNREADABLE:
                    if not self._may_be_over(one.message_id):
                        yield f"{text}, which cannot be read: {one.reason}"
                elif not self._may_be_dead(queue, self._last_generation(queue, one)):
                    yield f"{text}, which had attempts left: {one.reason}"

    def _last_generation(self, queue: Queue, dead: Dead) -> Sequence[Delivery]:
        copy = queue.name, dead.message_id
        return self.generations(copy)[-1] if copy in self.facts.deliveries else ()

    def _may_be_over(self, message_id: int) -> bool:
        """Whether the retention of a message may have ended."""
        keys = {key for key, ids in self.facts.ids.items() if message_id in ids}
        sent = [one for key in keys for one in self.facts.sent.get(key, ())]
        return any(one.retention_ms for one in sent)

    def stored_once(self) -> Iterator[str]:
        """One publish is one message, in all queues: a task that is repeated is applied once."""
        for key, ids in self.facts.ids.items():
            if len(ids) > 1:
                yield f"{key} is stored as {sorted(ids)}"
        keys: dict[int, str] = {}
        for key, ids in self.facts.ids.items():
            for one in ids:
                if keys.setdefault(one, key) != key:
                    yield f"{one} is the ID of {keys[one]} and of {key}"

    # --- Routing ------------------------------------------------------------

    def routing(self) -> Iterator[str]:
        """A queue gets what its filter takes, and nothing else."""
        for (name, _), each in self.facts.deliveries.items():
            sent = self.facts.sent.get(each[0].key, [])
            if sent and all(self.belongs(self.facts.queue(name), one) == NO for one in sent):
                yield f"{name} delivered {each[0].key}, which it should not get: {sent[0].headers}"

    def belongs(self, queue: Queue, sent: Sent) -> str:
        """Whether a message is for a queue, as far as clients can know."""
        if sent.only:
            return YES if sent.only == queue.name else NO
        if sent.ended < queue.began:
            return NO
        if any(purge.ended > sent.began for purge in queue.purges):
            return MAYBE
        if queue.name not in self._filters_of:
            self._filters_of[queue.name] = FiltersInTime(queue.filters)
        filters = self._filters_of[queue.name].judging(sent.began)
        taken = {takes(one, sent.headers) for one in filters}
        if taken == {False}:
            return NO
        return YES if taken == {True} and queue.ended < sent.began else MAYBE

    # --- Attempts and leases ------------------------------------------------

    def attempts(self) -> Iterator[str]:
        """Attempts count up by one, no further than the queue permits."""
        for copy, each in self.facts.deliveries.items():
            queue = self.facts.queue(copy[0])
            since = 0
            for generation in self.generations(copy):
                yield from self._counted(copy, queue, generation, since)
                since = generation[-1].began
            if len(each) > 1 and len({one.key for one in each}) > 1:
                yield f"{copy} came with different payloads"

    def _counted(
        self, copy: Copy, queue: Queue, each: Sequence[Delivery], since: int
    ) -> Iterator[str]:
        """The faults of one generation; `since`: when the last delivery of that before began."""
        numbers = [one.attempt for one in each]
        if queue.max_attempts and max(numbers) > queue.max_attempts:
            yield f"{copy} came as attempt {max(numbers)} of {queue.max_attempts}"
        if min(numbers) < 1:
            yield f"{copy} came as attempt {min(numbers)}"
        for earlier, later in itertools.pairwise(each):
            if earlier.attempt == later.attempt and not self.may_be_released(earlier, later):
                yield f"{copy} came twice as attempt {later.attempt}"
            if earlier.attempt > later.attempt and earlier.ended < later.began:
                yield f"{copy} came as attempt {later.attempt} after {earlier.attempt}"
        number = 0
        for one in sorted(each, key=lambda one: (one.attempt, one.starts_ms)):
            missing = one.attempt - number - 1
            unknown = _unknown_claims(queue, since, one.ended)
            if missing > unknown:
                yield (
                    f"{copy}: {missing} attempts before {one.attempt} came to no consumer, by "
                    f"{unknown} unknown claims"
                )
            number, since = one.attempt, one.began

    def leases(self) -> Iterator[str]:
        """A message has one lease at a time, which is the consumer's until it ends."""
        for token in self.facts.repeated_tokens:
            yield f"{token} was given twice"
        for copy, each in self.facts.deliveries.items():
            for earlier, later in itertools.pairwise(each):
                if self._given_back(earlier, later) or self._may_be_moved(earlier, later):
                    continue
                end_ms = self._lease_end_ms(earlier)
                if later.starts_ms < end_ms:
                    early = end_ms - later.starts_ms
                    yield (
                        f"{copy} was claimed again {early:g} ms before the end of the lease of "
                        f"attempt {earlier.attempt}"
                    )

    def after_ack(self) -> Iterator[str]:
        """What was acked does not come again, and no ack counts after another claim."""
        for copy, each in self.facts.deliveries.items():
            for place, one in enumerate(each):
                acks = [
                    use for use in self.facts.uses[one.token] if use.finishes and use.outcome == OK
                ]
                for later in each[place + 1 :] if acks else ():
                    yield (
                        f"{copy} came again as attempt {later.attempt} although the "
                        f"{acks[0].kind} of attempt {one.attempt} was answered"
                    )

    def may_be_released(self, earlier: Delivery, later: Delivery) -> bool:
        """Whether the attempt of the earlier one may not count."""
        uses = self.facts.uses[earlier.token]
        is_released = any(use.kind == "release" and use.outcome != FAIL for use in uses)
        return is_released or self._may_be_moved(earlier, later)

    def _may_be_moved(self, earlier: Delivery, later: Delivery) -> bool:
        """Whether a move of the queue may have ended the earlier lease."""
        moves = self.facts.queue(earlier.queue).moves
        return any(move.began < later.ended and move.ended > earlier.began for move in moves)

    def _given_back(self, earlier: Delivery, later: Delivery) -> bool:
        """Whether the consumer may have ended the lease before the later claim was answered."""
        return any(
            use.kind != "extend" and use.outcome != FAIL and use.began < later.ended
            for use in self.facts.uses[earlier.token]
        )

    def _lease_end_ms(self, one: Delivery) -> float:
        extended = [
            use
            for use in self.facts.uses[one.token]
            if use.kind == "extend" and use.outcome == OK and use.deadline_ms
        ]
        if not extended:
            return one.deadline_ms
        return max(extended, key=lambda use: use.ended).deadline_ms

    # --- Time ---------------------------------------------------------------

    def early(self) -> Iterator[str]:
        """Nothing comes before its time: a delay, a nack's, or the backoff of its queue."""
        for copy, each in self.facts.deliveries.items():
            sent = self.facts.sent.get(each[0].key, [])
            due = min((one.began + one.delay_ms * NS for one in sent), default=0)
            if each[0].ended < due - self._early_ns:
                yield f"{copy} came {(due - each[0].ended) / NS:g} ms before its time"
            for generation in self.generations(copy):  # a redriven one waits for nothing
                for earlier, later in itertools.pairwise(generation):
                    yield from self._too_soon(copy, earlier, later)

    def _too_soon(self, copy: Copy, earlier: Delivery, later: Delivery) -> Iterator[str]:
        uses = self.facts.uses[earlier.token]
        backoff_ms = self.facts.queue(copy[0]).backoff_ms
        waits = [
            use.began + (backoff_ms if use.delay_ms is None else use.delay_ms) * NS
            for use in uses
            if use.kind in ("nack", "release") and use.outcome == OK
        ]
        if waits and later.ended < min(waits) - self._early_ns:
            yield f"{copy} came {(min(waits) - later.ended) / NS:g} ms before the wait of its nack"
        is_kept = all(use.kind == "extend" and use.outcome != INFO for use in uses)
        if self._may_be_moved(earlier, later) or later.attempt <= earlier.attempt:
            return
        if backoff_ms and is_kept:
            early = self._lease_end_ms(earlier) + backoff_ms - later.starts_ms
            if early > 0:
                yield f"{copy} came {early:g} ms before its backoff was over"

    def late(self) -> Iterator[str]:
        """Nothing comes after its retention, and nothing from a queue that is paused."""
        pauses = {name: sorted(queue.pauses) for name, queue in self.facts.queues.items()}
        # By how many of its pauses had begun: when the last of these ended.
        resumed = {
            name: list(itertools.accumulate((end for _, end in each), max, initial=0))
            for name, each in pauses.items()
        }
        for (name, message_id), each in self.facts.deliveries.items():
            for one in each:
                for sent in self.facts.sent.get(one.key, ()):
                    gone = sent.ended + int(sent.retention_ms * NS)
                    if sent.retention_ms and one.began > gone + self._early_ns:
                        yield f"{name} delivered {message_id} after its retention"
                begun = bisect_left(pauses.get(name, ()), (one.began,))
                if begun and one.ended < resumed[name][begun]:
                    yield f"{name} delivered {message_id} while it was paused"

    def _note_order(self, spanning: Spanning) -> None:
        """What came when it had long been due, and what came instead.

        A process that is down keeps messages from coming, and those behind them, too. So a message
        counts as overdue only where claims with room gave others of its log that were published
        when it had been due for OVERDUE_NS. Judged are queues in which nothing else explains that.
        While the store is in trouble, what is in memory comes, and what must be read waits: that is
        due when the trouble is over.
        """
        for (name, message_id), each in self.facts.deliveries.items():
            if not self._keeps_its_order(self.facts.queue(name)):
                continue
            log, first = (name, message_id >> LOG_BITS), each[0]
            if first.has_room:
                sent = min((one.began for one in self.facts.sent.get(first.key, ())), default=NEVER)
                spanning.taken[log].add(message_id, first.ended, sent)
            for wanted, one in self._waits(each):
                due = self._after_troubles(wanted)
                limit = due + OVERDUE_NS + int(self._early_ns)
                if one.began > limit:
                    late_ms = (one.began - due) / NS
                    text = f"{name} delivered {one.key} {late_ms:g} ms after it was due"
                    late = Late(place_in_log(message_id), limit, one.began, text)
                    spanning.late[log].append(late)

    def _waits(self, each: Sequence[Delivery]) -> Iterator[tuple[int, Delivery]]:
        """From when on a message was due, and the delivery that it waited for."""
        first = each[0]
        due = self._due(first)
        if due is not None and first.attempt == 1:
            yield due, first
        for earlier, later in itertools.pairwise(each):
            uses = [one for one in self.facts.uses[earlier.token] if one.outcome != FAIL]
            given_back = [one for one in uses if one.kind in ("nack", "release")]
            if len(uses) != 1 or not given_back or uses[0].outcome != OK:
                continue
            [use] = given_back
            if later.attempt == earlier.attempt + (use.kind == "nack"):  # No other claim had it.
                yield use.ended + int((use.delay_ms or 0) * NS), later

    def _keeps_its_order(self, queue: Queue) -> bool:
        others = (queue.moves, queue.redrives, queue.purges, queue.pauses, queue.filters[1:])
        return queue.partitions_count == 1 and not queue.backoff_ms and not any(others)

    def _due(self, one: Delivery) -> int | None:
        """When a message is due for the first time; None: not known."""
        each = self.facts.sent.get(one.key, [])
        if len(each) != 1 or each[0].outcome != OK:
            return None
        return max(each[0].ended, each[0].began + int(each[0].delay_ms * NS))

    def _after_troubles(self, due: int) -> int:
        for trouble in self.facts.troubles:
            if trouble.began < due + OVERDUE_NS and trouble.ended > due:
                due = trouble.ended
        return due

    # --- Commands together --------------------------------------------------

    def commands(self) -> Iterator[str]:
        """Commands that belong together happen together, or not at all."""
        seen = self._seen()
        for one in self.facts.executions:
            pushed = [c["key"] for c in one.value["commands"] if c["do"] == "push"]
            came = [key for key in pushed if key in seen]
            if came and one.outcome == FAIL:
                yield f"{came[0]} was pushed by commands that were refused"
            again = self._again_after(one)
            if came and again:
                yield f"{came[0]} was pushed, and {again} came again all the same"
            if came and len(came) < len(pushed) and self._all_drained():
                lacking = next(key for key in pushed if key not in seen)
                yield f"{came[0]} was pushed without {lacking}, although they belong together"
        if self._all_drained():
            yield from self._half_done(seen)

    def _half_done(self, seen: set[str]) -> Iterator[str]:
        """What only commands can have ended of which nothing was pushed."""
        for (name, message_id), each in self.facts.deliveries.items():
            finishing = [
                use
                for one in each
                for use in self.facts.uses[one.token]
                if use.finishes and use.outcome != FAIL
            ]
            queue, key = self.facts.queue(name), each[0].key
            if message_id in queue.dead or self._may_be_gone(queue, key):
                continue
            if finishing and all(self._pushed_nothing(use.operation, seen) for use in finishing):
                yield f"{name} has completed {key} without what was pushed with it"

    def _pushed_nothing(self, one: Operation | None, seen: set[str]) -> bool:
        """Whether all pushes of these commands, and there are some, are missing for certain."""
        pushes = [c for c in one.value["commands"] if c["do"] == "push"] if one else []
        return bool(pushes) and not any(
            push["key"] in seen or self._may_be_gone(self.facts.queue(push["queue"]), push["key"])
            for push in pushes
        )

    def _may_be_gone(self, queue: Queue, key: str) -> bool:
        """Whether a message may have left a queue although no consumer finished it."""
        return bool(
            queue.purges
            or queue.name in self._whole.unknown_dead  # It may be one of them.
            or any(one.retention_ms for one in self.facts.sent.get(key, ()))
        )

    def _again_after(self, one: Operation) -> str:
        """A message that these commands finish, and that came under a later lease."""
        for command in one.value["commands"]:
            if command["do"] not in ("complete", "transfer"):
                continue
            delivery = self.facts.tokens.get(command["token"])
            if delivery is None:
                continue
            each = self.facts.deliveries[delivery.queue, delivery.message_id]
            if each[-1] is not delivery and each[-1].ended > delivery.ended:
                return f"{delivery.queue}'s {delivery.key}"
        return ""

    def _seen(self) -> set[str]:
        return {each[0].key for each in self.facts.deliveries.values()}

    def _all_drained(self) -> bool:
        names = self._queues.keys() | self._whole.delivering
        return all(self.facts.queue(name).drained_at for name in names)

    def tasks(self) -> Iterator[str]:
        """What a message becomes by commands, it becomes once, however often it is worked on."""
        seen = self._seen()
        effects: dict[Copy, int] = defaultdict(int)
        for one in self.facts.executions:
            came = any(c["do"] == "push" and c["key"] in seen for c in one.value["commands"])
            if one.outcome != OK and not came:
                continue
            for command in one.value["commands"]:
                delivery = self.facts.tokens.get(command.get("token", ""))
                if command["do"] == "complete" and delivery is not None:
                    effects[delivery.queue, delivery.message_id] += 1
        for copy, count in effects.items():
            if count > 1:
                yield f"{copy} was completed {count} times, with what belongs to it"

    # --- Redrives -----------------------------------------------------------

    def redrives(self) -> Iterator[str]:
        """Only dead letters begin again, by a redrive of their queue."""
        for copy in self.facts.deliveries:
            generations = self.generations(copy)
            for earlier, later in itertools.pairwise(generations):
                if not self._may_be_dead(self.facts.queue(copy[0]), earlier, later[0].ended):
                    yield f"{copy} begins again after attempt {earlier[-1].attempt}, not dead"
            if len(generations) > 1 and not self.facts.queue(copy[0]).redrives:
                yield f"{copy} came again as attempt 1, and {copy[0]} was never redriven"

    def _note_redrives(self, spanning: Spanning) -> None:
        """How many messages began again, and how many may have without being seen."""
        for copy, each in self.facts.deliveries.items():
            queue = self.facts.queue(copy[0])
            if not queue.redrives:
                continue
            again = len(self.generations(copy)) - 1
            if again:
                spanning.again[queue.name] += again
            spanning.released[queue.name] += sum(
                any(use.kind == "release" and use.outcome == INFO for use in uses)
                for uses in (self.facts.uses[one.token] for one in each)
            )

    def generations(self, copy: Copy) -> list[list[Delivery]]:
        """The deliveries of a copy, divided by the redrives of its queue."""
        each = self.facts.deliveries[copy]
        if len(each) == 1:
            return [each]
        if copy[0] not in self._redrives_of:
            self._redrives_of[copy[0]] = RedrivesInTime(self.facts.queue(copy[0]).redrives)
        redrives, begin = self._redrives_of[copy[0]], 0
        generations: list[list[Delivery]] = [[]]
        for one in each:
            last = generations[-1][-1] if generations[-1] else None
            begins = last is not None and one.attempt <= last.attempt
            if begins and last is not None and not self.may_be_released(last, one):
                moved = redrives.first_between(last.began, one.ended, begin)
                if moved is not None:
                    begin = moved + 1
                    generations.append([])
            generations[-1].append(one)
        return generations

    def _may_be_dead(self, queue: Queue, each: Sequence[Delivery], until: int = NEVER) -> bool:
        """Whether a message may have been dead by then, after these deliveries."""
        uses = self.facts.uses[each[-1].token] if each else ()
        if any(use.kind == "fail" and use.outcome != FAIL for use in uses):
            return True
        number, since = (each[-1].attempt, each[-1].began) if each else (0, 0)
        unseen = _unknown_claims(queue, since, until)
        return bool(queue.max_attempts) and number + unseen >= queue.max_attempts


def _unknown_claims(queue: Queue, since: int, until: int) -> int:
    """How many claims of unknown outcome may have taken effect in this time."""
    return sum(since - UNKNOWN_NS < one.began < until for one in queue.unknown_claims)


class RedrivesInTime:
    """The redrives of a queue, in the order of their beginnings."""

    def __init__(self, redrives: Sequence[Operation]) -> None:
        self._redrives = redrives
        # Of those up to each: when the last one ended.
        self._ended = list(itertools.accumulate((one.ended for one in redrives), max))

    def first_between(self, since: int, until: int, begin: int) -> int | None:
        """The place of the first one, from `begin` on, that may have been in this time."""
        for place in range(max(begin, bisect_right(self._ended, since)), len(self._redrives)):
            one = self._redrives[place]
            if one.began >= until:
                return None
            if one.ended > since:
                return place
        return None


class FiltersInTime:
    """The filters by which a queue may judge a message.

    Those are the last one answered before it, and all later. One without an answer may come into
    force at any time since it began.
    """

    def __init__(self, filters: Sequence[Filter]) -> None:
        ended = sorted((one.ended, place) for place, one in enumerate(filters))
        self._ends = [at for at, _ in ended]
        self._last = list(itertools.accumulate((place for _, place in ended), max, initial=0))
        later = {one.expression for one in filters if one.ended == NEVER}
        self._from = [frozenset(later := later | {one.expression}) for one in reversed(filters)]
        self._from.reverse()

    def judging(self, began: int) -> frozenset[str]:
        """Those of a message that was sent from this moment on."""
        return self._from[self._last[bisect_left(self._ends, began)]] if self._from else frozenset()


RULES: Final[dict[str, Callable[[Judge], Iterator[str]]]] = {
    "lost": Judge.lost,
    "unsent": Judge.unsent,
    "stored-once": Judge.stored_once,
    "routing": Judge.routing,
    "content": Judge.content,
    "dead": Judge.dead,
    "attempts": Judge.attempts,
    "leases": Judge.leases,
    "after-ack": Judge.after_ack,
    "early": Judge.early,
    "late": Judge.late,
    "commands": Judge.commands,
    "tasks": Judge.tasks,
    "redrives": Judge.redrives,
}

NAMES: Final = tuple(RULES | SPANNING)
"""Of all rules, in the order in which faults are listed."""
