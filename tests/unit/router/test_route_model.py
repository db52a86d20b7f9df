"""Any interleaving of routers, one broker, restarts and lost answers assigns every entry once."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from libs.storage.log_runs import LogRun
from services.router.route import Piece, PieceLimits, Route
from services.router.routing import NO_DELAY, Columns, Judgement, LogEntry, QueueColumns
from tests.forms import examples

LIMITS = PieceLimits(messages_max=6, matches_max=100, step_max=3, hold_ms=0)
LETTERS = "abc"

Configs = dict[str, str]
"""The letter that each queue takes."""


class LetterRules:
    """Queues that take the messages whose header is their letter."""

    def __init__(self, revision: int, configs: Configs) -> None:
        self.revision = revision
        self.configs = configs

    def judge(self, entry: LogEntry, columns: Columns) -> Judgement:
        for queue_id, letter in self.configs.items():
            ids = [numbers[0] for numbers, headers, *_ in entry.runs if headers["letter"] == letter]
            if ids:
                columns.setdefault(queue_id, QueueColumns()).message_ids.extend(ids)
        return Judgement(len(columns), 0)


@dataclass(eq=False)
class Call:
    """An Assign on its way: where it goes and what it says."""

    previous: int
    last: int
    revision: int
    matches: dict[str, list[int]]
    answer: int | None = None
    """The cursor told, once the broker has worked on it."""


@dataclass(eq=False)
class RouterModel:
    """One router: what it has read, its configs, its call in flight."""

    route: Route
    rules: LetterRules
    tail_position: int = 0
    call: Call | None = None


@dataclass
class BrokerModel:
    """The broker's durable memory: the decision that everything rests on."""

    log: list[LogEntry]
    cursor: int = 0
    revision: int = 0
    configs: Configs = field(default_factory=dict)
    assigned: list[int] = field(default_factory=list)

    def work(self, call: Call) -> None:
        if call.previous == self.cursor and call.revision == self.revision:
            judged = [e for e in self.log if call.previous < e.sequence <= call.last]
            assert judged, "a call without an entry"
            assert judged[-1].sequence == call.last, "a call that ends where no entry does"
            expected: Columns = {}
            for entry in judged:
                LetterRules(self.revision, self.configs).judge(entry, expected)
            assert call.matches == {k: v.message_ids for k, v in expected.items()}
            self.assigned += [entry.sequence for entry in judged]
            self.cursor = call.last
        call.answer = self.cursor


class Routing(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[LogEntry] = []
        self.broker = BrokerModel(self.log)
        self.routers = [self._new_router(), self._new_router()]
        self.orphans: list[Call] = []

    def _new_router(self) -> RouterModel:
        model = RouterModel(Route(self.broker.cursor), self._told_rules())
        model.tail_position = model.route.position
        return model

    def _told_rules(self) -> LetterRules:
        return LetterRules(self.broker.revision, dict(self.broker.configs))

    @rule(letters=st.text(LETTERS, min_size=1, max_size=4), gap=st.integers(0, 3))
    def publish(self, letters: str, gap: int) -> None:
        first = (self.log[-1].runs[-1][0][0] if self.log else 0) + 1 + gap
        runs: list[LogRun] = [
            ((first + n, 0, 0, 0, 0), {"letter": letter}, NO_DELAY, (0,), "")
            for n, letter in enumerate(letters)
        ]
        self.log.append(LogEntry(first, runs, 10 * len(runs), lambda: list(runs)))

    @rule(queue_id=st.sampled_from(["x", "y"]), letter=st.sampled_from([*LETTERS, None]))
    def change_queue(self, queue_id: str, letter: str | None) -> None:
        self.broker.revision += 1
        if letter is None:
            self.broker.configs.pop(queue_id, None)
        else:
            self.broker.configs[queue_id] = letter

    @rule(who=st.integers(0, 1), count=st.integers(1, 3))
    def read(self, who: int, count: int) -> None:
        router = self.routers[who]
        if router.route.position < router.tail_position:
            router.tail_position = router.route.position
        after = router.tail_position
        entries = [e for e in self.log if e.sequence > after][:count]
        router.route.offer(after, entries)
        if entries:
            router.tail_position = entries[-1].sequence

    @rule(who=st.integers(0, 1))
    def judge(self, who: int) -> None:
        router = self.routers[who]
        router.route.judge(router.rules, 0, LIMITS)

    @rule(who=st.integers(0, 1))
    def send(self, who: int) -> None:
        router = self.routers[who]
        if router.call is None and router.route.due_ms(LIMITS) is not None:
            piece = router.route.send()
            router.call = _call(piece)

    @rule(who=st.integers(0, 1))
    def broker_works(self, who: int) -> None:
        call = self.routers[who].call
        if call is not None and call.answer is None:
            self.broker.work(call)

    @precondition(lambda self: self.orphans)
    @rule()
    def broker_works_on_a_call_given_up(self) -> None:
        self.broker.work(self.orphans.pop())

    @rule(who=st.integers(0, 1))
    def answer_arrives(self, who: int) -> None:
        router = self.routers[who]
        if router.call is not None and router.call.answer is not None:
            if router.call.revision != self.broker.revision:
                router.rules = self._told_rules()
            router.route.answered(router.call.answer)
            router.call = None

    @rule(who=st.integers(0, 1))
    def answer_is_lost(self, who: int) -> None:
        router = self.routers[who]
        if router.call is not None:
            if router.call.answer is None:
                self.orphans.append(router.call)
            router.call = None
            router.route.lost()

    @rule(who=st.integers(0, 1))
    def watch_tells(self, who: int) -> None:
        self.routers[who].rules = self._told_rules()

    @rule(who=st.integers(0, 1))
    def reconnect(self, who: int) -> None:
        router = self.routers[who]
        self.answer_is_lost(who)
        router.rules = self._told_rules()
        router.route.adopt(self.broker.cursor)

    @rule(who=st.integers(0, 1))
    def router_restarts(self, who: int) -> None:
        self.answer_is_lost(who)
        self.routers[who] = self._new_router()

    @rule(who=st.integers(0, 1))
    def router_is_short_of_memory(self, who: int) -> None:
        self.routers[who].route.forget()

    @invariant()
    def every_entry_is_assigned_once_in_order(self) -> None:
        through = [e.sequence for e in self.log if e.sequence <= self.broker.cursor]
        assert self.broker.assigned == through

    @invariant()
    def what_is_in_hand_is_counted(self) -> None:
        for router in self.routers:
            route = router.route
            held = [e for e in self.log if route.cursor < e.sequence <= route.position]
            assert route.pending_count == sum(e.messages_count for e in held)
            assert route.pending_bytes == sum(e.size_bytes for e in held)
            judged = [p for p in (route.judged, route.in_flight) if p is not None]
            waiting = [e for e in held if all(e not in p.entries for p in judged)]
            assert route.waiting_count == sum(e.messages_count for e in waiting)

    def teardown(self) -> None:
        """Left alone, a router brings the broker to the end of the log."""
        for _ in range(4 * len(self.log) + 8):
            self.read(0, 3)
            self.judge(0)
            self.send(0)
            self.broker_works(0)
            self.answer_arrives(0)
        assert self.broker.assigned == [e.sequence for e in self.log]


def _call(piece: Piece) -> Call:
    matches = {queue_id: columns.message_ids for queue_id, columns in piece.columns.items()}
    return Call(piece.previous, piece.last, piece.revision, matches)


TestRouting = Routing.TestCase
TestRouting.settings = settings(max_examples=examples(150), stateful_step_count=60, deadline=None)
