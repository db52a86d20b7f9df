"""Random histories of publishes, config changes, routers, crashes and lost answers.

The broker's shard, its log of configs, the routers' rules and routes are the real ones; what is
modelled is what lies between them: calls, commits and time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from libs.storage.records.log_runs import LogRun
from libs.storage.records.metadata import NO_DELAY
from services.broker.core.commands import Assignment, Range
from services.broker.core.config_log import ConfigChange
from services.broker.core.lists.replays import Counts, Starts, ranges_from
from services.broker.core.settings import QueueSettings
from services.broker.rpc.assignment import is_outdated
from services.router.entries import LogEntry
from services.router.pieces import Seen
from services.router.route import Route
from services.router.routing import BrokerRules, Columns, QueueRule
from slatemq._byte_budget import ByteBudget
from tests.forms import seeds
from tests.unit.broker.core.applied import assign_all, backfill_whole
from tests.unit.broker.core.shards import START_MS
from tests.unit.router.routing_model import (
    LETTERS,
    LIMITS,
    LOG,
    QUEUES,
    Broker,
    Call,
    Router,
    Version,
    drained,
    source,
)

BUDGET_BYTES = 8_000
"""Of each router: a handful of entries is more."""


class Routing:
    """A random history. Whether routers are fast or slow, beside calm or hectic changes, varies."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.log: list[LogEntry] = []
        self.published: list[int] = []
        """When each entry was published."""
        self.log_end = 0
        """The last message of the log, even where it is gone."""
        self.now = 0
        self.versions: dict[str, list[Version]] = {queue_id: [] for queue_id in QUEUES}
        self.broker = Broker()
        self.routers = [self.new_router(), self.new_router()]
        self.orphans: list[Call] = []

    def new_router(self) -> Router:
        budget = ByteBudget(BUDGET_BYTES)
        router = Router(Route(self.broker.durable.cursor, budget), budget)
        router.tail_position = router.route.position
        self.learn(router)
        return router

    def learn(self, router: Router) -> None:
        """A watch reports what is durable."""
        changes, revision = [], self.broker.durable.revision
        if revision > router.rules.revision:
            for one in self.broker.configs.after(router.rules.revision):
                router.configs.pop(one.queue_id, None)
                if one.settings is None:
                    changes.append(QueueRule(one.queue_id, deleted=True))
                else:
                    router.configs[one.queue_id] = one.settings
                    changes.append(QueueRule(one.queue_id, one.settings.filter))
                router.replays[one.queue_id] = self.broker.durable.replays.get(one.queue_id, ())
            router.rules.change(changes, revision)
            router.rules.revision = revision
            oldest = router.route.revision
            router.rules.forget_changes(revision if oldest is None else oldest)

    # --- The log and the queues -----------------------------------------------

    def publish(self, dead_letters: str, gap: int) -> None:
        first = self.log_end + 1 + gap
        runs: list[LogRun] = [
            ((first + n, 0, 0, 0, 0), {"letter": dead_letter}, NO_DELAY, (0,), "")
            for n, dead_letter in enumerate(dead_letters)
        ]
        self.log.append(LogEntry(runs, 10 * len(runs), lambda: list(runs)))
        self.published.append(self.now)
        self.log_end = self.log[-1].last

    def publish_what_is_purged(self, count: int) -> None:
        """Before any router has read it."""
        self.log_end += count

    def change_queue(
        self, queue_id: str, dead_letter: str | None, *, in_past: bool, durable: bool
    ) -> None:
        shard = self.broker.shard
        queue = shard.queues.get(queue_id)
        if dead_letter is None:
            if queue is not None:
                shard.delete_queue(queue)
                self.broker.sweep()
        elif queue is not None:
            shard.update_queue(queue, queue.settings.changed(filter=source(dead_letter)))
        elif shard.epoch_is_free(queue_id):
            starts = Starts(0, {LOG: 0}) if in_past else None
            replay = ranges_from(starts, shard.cursors)
            shard.create_queue(queue_id, QueueSettings(source(dead_letter)), replay)
            # One that a crash took back may have had the same revision.
            self.broker.past.discard(shard.revision)
            if in_past:
                self.broker.past.add(shard.revision)
        if durable:
            self.all_durable()

    def change_what_routing_does_not_ask(self, queue_id: str) -> None:
        queue = self.broker.shard.queues.get(queue_id)
        if queue is not None:
            settings = queue.settings.changed(paused=not queue.settings.paused)
            self.broker.shard.update_queue(queue, settings)

    def commit(self) -> None:
        self.broker.commit()

    def commit_is_durable(self) -> None:
        """From here on the changes are answered: what is published later knows of them."""
        changes = self.broker.make_durable()
        self.now += 1
        for change in changes:
            dead_letter, created = None, change.revision
            if change.settings is not None:
                dead_letter = change.settings.filter[-2]
                created = self.created_by(change)
            version = Version(self.now, created, dead_letter, created in self.broker.past)
            self.versions[change.queue_id].append(version)

    def created_by(self, change: ConfigChange) -> int:
        """The revision with which the queue of a change was created."""
        before = self.versions[change.queue_id]
        if before and before[-1].dead_letter is not None:
            return before[-1].created
        return change.revision

    def all_durable(self) -> None:
        self.broker.commit()
        while self.broker.reports:
            self.commit_is_durable()

    def broker_crashes(self) -> None:
        self.broker.crash()

    # --- The routers ------------------------------------------------------------

    def go_on(self, who: int, steps: int) -> None:
        """What comes next on the way of this router's pieces, this many times."""
        for _ in range(steps):
            router = self.routers[who]
            if router.call is not None and router.call.answer is not None:
                self.answer_arrives(who)
            elif router.call is not None:
                self.broker_works(who)
            elif router.route.can_judge(LIMITS):
                self.judge(who)
            elif router.route.due_ms(LIMITS) is not None:
                self.send(who, catches_up=steps % 3 > 0)
            else:
                self.read(who, 1 + steps % 3)

    def read(self, who: int, count: int) -> None:
        router = self.routers[who]
        if router.route.position < router.tail_position:
            router.tail_position = router.route.position
        after = router.tail_position
        entries = [e for e in self.log if e.last > after][:count]
        through = entries[-1].last if entries else self.log_end
        router.route.offer(after, entries, through)
        router.tail_position = through

    def judge(self, who: int) -> None:
        router = self.routers[who]
        router.route.refresh_waiting(router.rules, LIMITS)
        router.route.judge(router.rules, 0, LIMITS)

    def send(self, who: int, *, catches_up: bool) -> None:
        router = self.routers[who]
        route, piece = router.route, router.route.next_piece
        if router.call is not None or piece is None or route.due_ms(LIMITS) is None:
            return
        if catches_up and not piece.is_caught_up:
            router.route.catch_up(router.rules)
            if piece.is_catching_up:
                return
        router.sent = route.send()
        columns = [Assignment(name, one.message_ids) for name, one in piece.columns.items()]
        judged = Range(LOG, piece.previous, piece.last, columns, piece.revision)
        router.call = Call(judged, route.seen_of(piece))

    def broker_works(self, who: int) -> None:
        call = self.routers[who].call
        if call is not None and call.answer is None:
            self.work(call)

    def work(self, call: Call) -> None:
        broker, piece = self.broker, call.piece
        revision, seen = broker.durable.revision, call.seen
        proven = seen is not None and seen.incarnation == broker.incarnation
        at_cursor = piece.previous == broker.shard.cursors.get(LOG, 0)
        outdated = at_cursor and is_outdated(
            piece, broker.configs, revision, seen.revision if seen and proven else 0
        )
        if not outdated:
            assign_all(broker.shard, [piece], START_MS)
        cursor = broker.durable.cursor if outdated else broker.shard.cursors.get(LOG, 0)
        call.answer = outdated, cursor, revision, broker.incarnation

    def broker_works_on_a_call_given_up(self) -> None:
        if self.orphans:
            self.work(self.orphans.pop())

    def answer_arrives(self, who: int) -> None:
        router = self.routers[who]
        if router.call is None or router.call.answer is None or router.sent is None:
            return
        outdated, cursor, revision, incarnation = router.call.answer
        if not outdated:
            self.all_durable()  # It is not sent before.
            if cursor > self.broker.durable.cursor:
                self.answer_is_lost(who)  # A crash came first.
                return
        router.call = None
        if router.rules.revision < revision:
            self.learn(router)
        router.route.seen = Seen(router.sent.read_until, revision, incarnation)
        if outdated:
            router.route.outdated(router.rules)
        else:
            router.route.answered(cursor)

    def answer_is_lost(self, who: int) -> None:
        router = self.routers[who]
        if router.call is not None:
            if router.call.answer is None:
                self.orphans.append(router.call)
            router.call = None
            router.route.lost()

    def watch_reports(self, who: int) -> None:
        self.learn(self.routers[who])

    def reconnect(self, who: int) -> None:
        router = self.routers[who]
        self.answer_is_lost(who)
        self.learn(router)
        router.route.adopt(self.broker.durable.cursor)

    def router_restarts(self, who: int) -> None:
        self.answer_is_lost(who)
        self.routers[who] = self.new_router()

    def router_is_short_of_memory(self, who: int) -> None:
        self.routers[who].route.forget()

    # --- Replays ------------------------------------------------------------------

    def backfill(self, who: int, queue_id: str, count: int) -> None:
        """A router brings in some of a queue's replay, by what it knows of it."""
        queue = self.broker.shard.queues.get(queue_id)
        known = self.routers[who].configs.get(queue_id)
        ranges = self.routers[who].replays.get(queue_id, ())
        current = self.broker.shard.replays.range_of(queue_id, LOG)
        if queue is None or known is None or not ranges or current is None:
            return
        [span] = ranges
        cursor = max(span.cursor, current.cursor)  # as a refusal would report
        entries = [
            entry.between(cursor, span.end)
            for entry in self.log
            if entry.last > cursor and entry.first <= span.end and cursor < span.end
        ][:count]
        if not entries or queue.routing_revision > known.revision or span.end > current.end:
            return
        rules, columns = BrokerRules(), Columns()
        rules.change([QueueRule(queue_id, known.filter)])
        for entry in entries:
            rules.judge(entry, columns)
        judged = [Assignment(name, one.message_ids) for name, one in columns.items()]
        piece = Range(LOG, cursor, entries[-1].last, judged)
        backfill_whole(self.broker.shard, queue, piece, Counts(0, 0), START_MS)

    # --- What must hold -------------------------------------------------------------

    def ids(self) -> list[int]:
        return [run[0][0] for entry in self.log for run in entry.runs]

    def check_counts(self) -> None:
        for router in self.routers:
            route = router.route
            held = [i for i in self.ids() if route.cursor < i <= route.position]
            assert route.pending_count == len(held)
            assert route.pending_bytes == 10 * len(held)
            judged = [p for p in (route.judged, route.in_flight) if p is not None]
            ends = [p.last for p in judged]
            waiting = [i for i in held if all(i > end for end in ends)]
            assert route.waiting_count == len(waiting)
            assert router.budget.used_bytes == route.memory_bytes
            assert (route.memory_bytes > 0) == bool(held)

    def play(self, steps: int) -> None:
        chance, pick = self.random.random, self.random.choice
        both = (0, 1)
        actions: list[tuple[float, Callable[[], None]]] = [
            (
                3,
                lambda: self.publish(
                    "".join(self.random.choices(LETTERS, k=pick((1, 2, 4)))), pick(range(4))
                ),
            ),
            (
                pick((1, 3)),
                lambda: self.change_queue(
                    pick(QUEUES),
                    pick([*LETTERS, *LETTERS, None]),
                    in_past=chance() < 0.5,
                    durable=chance() < 0.5,
                ),
            ),
            (0.5, lambda: self.publish_what_is_purged(pick((1, 2, 4)))),
            (0.5, lambda: self.change_what_routing_does_not_ask(pick(QUEUES))),
            (1, self.commit),
            (1, self.commit_is_durable),
            (0.1, self.broker_crashes),
            (6, lambda: self.go_on(pick(both), pick(range(1, 9)))),
            (1, lambda: self.read(pick(both), pick((1, 2, 3)))),
            (1, lambda: self.judge(pick(both))),
            (1, lambda: self.send(pick(both), catches_up=chance() < 0.5)),
            (1, lambda: self.broker_works(pick(both))),
            (0.2, self.broker_works_on_a_call_given_up),
            (1, lambda: self.answer_arrives(pick(both))),
            (0.2, lambda: self.answer_is_lost(pick(both))),
            (pick((0.3, 2)), lambda: self.watch_reports(pick(both))),
            (0.2, lambda: self.reconnect(pick(both))),
            (0.1, lambda: self.router_restarts(pick(both))),
            (0.2, lambda: self.router_is_short_of_memory(pick(both))),
            (1, lambda: self.backfill(pick(both), pick(QUEUES), pick((1, 2, 3)))),
        ]
        weights, functions = zip(*actions, strict=True)
        for function in self.random.choices(functions, weights, k=steps):
            function()
            self.check_counts()
        self.end()

    def end(self) -> None:
        """Left alone, a router brings all to the end; each queue has then what it must have."""
        for orphan in self.orphans:
            self.work(orphan)
        self.all_durable()
        self.answer_is_lost(1)
        for _ in range(12 * len(self.log) + 12):
            self.learn(self.routers[0])
            self.read(0, 3)
            self.judge(0)
            self.send(0, catches_up=True)
            self.broker_works(0)
            self.answer_arrives(0)
            for queue_id in QUEUES:
                self.backfill(0, queue_id, 3)
            self.all_durable()
        assert self.broker.shard.cursors.get(LOG, 0) == self.log_end
        self.broker.crash()
        for queue_id in QUEUES:
            self.check(queue_id)

    def check(self, queue_id: str) -> None:
        counts = Counter(asyncio.run(drained(self.broker, queue_id)))
        assert set(counts.values()) <= {1}, "a message is in the queue twice"
        versions = self.versions[queue_id]
        if not versions or versions[-1].dead_letter is None:
            assert not counts
            return
        created = versions[-1].created
        own = [version for version in versions if version.created == created]
        for entry, published in zip(self.log, self.published, strict=True):
            later = [v for at, v in enumerate(own) if v.since > published or v is own[-1]]
            before = [v for v in own if v.since <= published]
            judges = {v.dead_letter for v in [*before[-1:], *later]}
            for numbers, headers, *_ in entry.runs:
                got = numbers[0] in counts
                if before or own[0].starts_in_past:
                    assert got or judges != {headers["letter"]}, (numbers[0], "is missing")
                assert not got or headers["letter"] in judges, (numbers[0], "does not belong")


HISTORIES = 150
"""For each seed: a second or two."""


@pytest.mark.parametrize("seed", seeds(60))
def test_each_queue_gets_what_it_must_once_whatever_changes_beside_routing(seed: int) -> None:
    random = Random(seed)
    for _ in range(HISTORIES):
        Routing(random).play(steps=random.choice((20, 60, 150)))
