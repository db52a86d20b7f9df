"""The queues of a message, at a cost that hardly grows with the number of queues."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from libs.filters.allowance import FREE_NS, Allowance
from libs.filters.conditions import Condition
from libs.filters.engine import cel
from libs.filters.expressions import (
    Facts,
    Filter,
    Outcome,
    Priority,
    context,
)
from libs.filters.plain import Test

DEFAULT_PRIORITY = 128

NOTHING: Final = frozenset[str]()

ALWAYS_SEEN: Final = frozenset(("headers", "size"))
"""Variables that every context has."""

WAYS_KEPT: Final = 1_024
"""Ways of judging that are shared by the queues judged so."""

Pair = tuple[str, str]

Fields = tuple[int, int, int, int, int]
"""Of a message: ID, created at, received at, visible at (0: not set), retention."""


WITHOUT_END: Final = 1 << 63
"""A time that the clock never reaches."""


class Rest(NamedTuple):
    """The rest of a message that was judged for some of its queues.

    Rules may change before it continues: queues that are gone are left out then, new ones are not
    judged, and changed ones may have been judged by their former rules.

    Attributes:
        candidates: The queues still to be judged, ascending.
        routed: The results of those before them.
        fallbacks: Of these, the ones whose priority failed.
    """

    candidates: Sequence[str]
    routed: Sequence[tuple[str, int]]
    fallbacks: Sequence[str]


class OutOfTime(Exception):
    """The time of a step is over in the middle of a message.

    Attributes:
        rest: Continue with it.
    """

    def __init__(self, rest: Rest) -> None:
        super().__init__(f"{len(rest.candidates)} queues are still to be judged")
        self.rest = rest


class FilterIndex:
    """Queue IDs by one header pair of each alternative of their conditions."""

    def __init__(self) -> None:
        self._by_pair: dict[Pair, set[str]] = {}
        self._unindexed: set[str] = set()
        self._pairs: dict[str, set[Pair]] = {}

    def add(self, queue_id: str, condition: Condition | None) -> Set[Pair] | None:
        """Add or replace the queue, under the rarest pair of each alternative.

        Returns these pairs: the queue is a candidate for headers with one of them. None: always.
        """
        self.remove(queue_id)
        if condition is None or frozenset() in condition:
            self._unindexed.add(queue_id)
            return None
        chosen = {min(pairs, key=lambda pair: (self._load(pair), pair)) for pairs in condition}
        self._pairs[queue_id] = chosen
        for pair in chosen:
            self._by_pair.setdefault(pair, set()).add(queue_id)
        return chosen

    def remove(self, queue_id: str) -> None:
        self._unindexed.discard(queue_id)
        for pair in self._pairs.pop(queue_id, ()):
            self._by_pair[pair].discard(queue_id)
            if not self._by_pair[pair]:
                del self._by_pair[pair]

    def candidates(self, headers: Mapping[str, str]) -> Set[str]:
        """The queues whose condition may hold, and those without one. Do not change the set."""
        found: Set[str] = self._unindexed
        for pair in headers.items():
            if queues := self._by_pair.get(pair):
                found = found | queues if found else queues
        return found

    def _load(self, pair: Pair) -> int:
        return len(self._by_pair.get(pair, ()))


@dataclass(frozen=True, slots=True)
class QueueOutcome:
    """Whether a message would reach a queue, its priority (128 if not), and the reason.

    `waits`: it would wait in the log, and be judged later.
    """

    queue_id: str
    matched: bool
    priority: int
    reason: str
    waits: bool = False


@dataclass(frozen=True, slots=True)
class _Rule:
    filter: Filter
    priority: Priority | None
    fallback_priority: int

    @property
    def needs(self) -> frozenset[str]:
        """The variables that it reads, without those of every context."""
        priority = self.priority.checked.variables if self.priority else frozenset[str]()
        return (self.filter.checked.variables | priority) - ALWAYS_SEEN


class _Way(NamedTuple):
    """How a candidate is judged; queues that are judged in the same way share one.

    Attributes:
        tests: All must hold.
        rule: Evaluated then; None: the queue matches with the default priority.
        needs_filter: Whether to evaluate the filter and the priority, or the priority alone.
        needs: The variables to read, without those of every context.
    """

    tests: tuple[Test, ...]
    rule: _Rule | None
    needs_filter: bool
    needs: frozenset[str]


def _way(rule: _Rule, chosen: Set[Pair] | None) -> _Way:
    """The way for a rule; `chosen` is the result of `FilterIndex.add`."""
    tests = []
    needs_filter = False
    for part in rule.filter.checked.parts:
        if part.pairs is not None and chosen is not None and chosen <= part.pairs:
            continue  # It holds for every candidate.
        if part.test is None:
            needs_filter = True
        else:
            tests.append(part.test)
    if not needs_filter and rule.priority is None:
        return _plain(tuple(tests))
    return _Way(tuple(tests), rule, needs_filter, rule.needs)


@lru_cache(WAYS_KEPT)
def _plain(tests: tuple[Test, ...]) -> _Way:
    return _Way(tests, None, needs_filter=False, needs=frozenset())


class RuleSet:
    """The filters and priorities of all queues of a router.

    Attributes:
        fallbacks: The queue of every priority that failed in `route` or `priority`, until cleared.
        reads_ids: Whether an expression reads the message ID, so that every message differs.
    """

    def __init__(self, allowance: Allowance | None = None) -> None:
        self.fallbacks: list[str] = []
        self._allowance = allowance or Allowance()
        self._index = FilterIndex()
        self._rules: dict[str, _Rule] = {}
        self._ways: dict[str, _Way] = {}
        self._reading_ids: set[str] = set()
        self._seen: tuple[Mapping[str, str] | None, list[tuple[str, int]]] = (None, [])

    @property
    def reads_ids(self) -> bool:
        return bool(self._reading_ids)

    def replace(
        self,
        queue_id: str,
        filter_source: str,
        priority_source: str | None = None,
        fallback_priority: int = DEFAULT_PRIORITY,
    ) -> None:
        """Set a queue's rule; FilterError leaves it as it was. No priority source means 128."""
        priority = Priority(priority_source) if priority_source else None
        rule = _Rule(Filter(filter_source), priority, fallback_priority)
        self._allowance.forget(queue_id)
        self._put(queue_id, rule)

    def _put(self, queue_id: str, rule: _Rule) -> None:
        self._seen = (None, [])
        self._rules[queue_id] = rule
        if "message_id" in rule.needs:
            self._reading_ids.add(queue_id)
        else:
            self._reading_ids.discard(queue_id)
        self._ways[queue_id] = _way(rule, self._index.add(queue_id, rule.filter.checked.equalities))

    def remove(self, queue_id: str) -> None:
        self._seen = (None, [])
        self._allowance.forget(queue_id)
        self._reading_ids.discard(queue_id)
        self._rules.pop(queue_id, None)
        self._ways.pop(queue_id, None)
        self._index.remove(queue_id)

    def only(self, queue_ids: Iterable[str]) -> RuleSet:
        """A set with the rules of these queues, without those unknown."""
        some = RuleSet(self._allowance)
        for queue_id in queue_ids:
            rule = self._rules.get(queue_id)
            if rule is not None:
                some._put(queue_id, rule)
        return some

    def route(
        self,
        headers: dict[str, str],
        fields: Fields,
        delay_ms: int,
        size: int,
        until_ns: int = WITHOUT_END,
        rest: Rest | None = None,
    ) -> list[tuple[str, int]]:
        """The queues that match and their priorities, in ascending order of queue ID.

        Do not change the list: messages with the same headers object may share it. `delay_ms` is
        negative for a message without a delay of its own. Raises TooSlow.

        Raises OutOfTime after the first evaluation that ends after `until_ns`; pass its `rest` to
        continue.
        """
        if headers is self._seen[0]:
            return self._seen[1]
        if rest is None:
            routed: list[tuple[str, int]] = []
            candidates = sorted(self._index.candidates(headers))
        else:
            routed, candidates = self._resumed(rest)
        message = None
        has = NOTHING
        ways = self._ways
        for queue_id in candidates:
            tests, rule, needs_filter, needs = ways[queue_id]
            for test in tests:
                if not test(headers):
                    break
            else:
                if rule is None:
                    routed.append((queue_id, DEFAULT_PRIORITY))
                    continue
                if message is None or (needs and not needs <= has):
                    has |= needs
                    seen = Facts(headers, size=size)
                    if has:
                        seen = facts(headers, fields, delay_ms, size)
                    message = context(seen, has)
                allowance = self._allowance
                began_ns = allowance.now_ns()
                if began_ns - allowance.mark_ns > FREE_NS:
                    allowance.mark(began_ns)
                if not needs_filter or rule.filter.matches(message):
                    routed.append((queue_id, self._priority(queue_id, rule, message)))
                ended_ns = allowance.now_ns()
                allowance.spend(queue_id, ended_ns - began_ns)
                if ended_ns > until_ns and queue_id != candidates[-1]:
                    left = candidates[bisect_right(candidates, queue_id) :]
                    raise OutOfTime(Rest(left, routed, self.fallbacks.copy()))
        if message is None and rest is None:  # Only headers were read.
            self._seen = (headers, routed)
        return routed

    def take_spent(self) -> dict[str, int]:
        return self._allowance.take_spent()

    def has_answer(self, headers: dict[str, str]) -> bool:
        """Whether `route` returns its last result for these headers, for any other fields."""
        return headers is self._seen[0]

    def _resumed(self, rest: Rest) -> tuple[list[tuple[str, int]], list[str]]:
        """The results so far and the queues to judge, of the queues that still exist."""
        ways = self._ways
        self.fallbacks += [queue_id for queue_id in rest.fallbacks if queue_id in ways]
        routed = [one for one in rest.routed if one[0] in ways]
        return routed, [queue_id for queue_id in rest.candidates if queue_id in ways]

    def priority(
        self, queue_id: str, headers: dict[str, str], fields: Fields, delay_ms: int, size: int
    ) -> int:
        """The priority of a message in a queue, regardless of its filter.

        Raises KeyError, TooSlow.
        """
        rule = self._rules[queue_id]
        if rule.priority is None:
            return DEFAULT_PRIORITY
        message = context(facts(headers, fields, delay_ms, size), rule.needs)
        allowance = self._allowance
        began_ns = allowance.now_ns()
        if began_ns - allowance.mark_ns > FREE_NS:
            allowance.mark(began_ns)
        priority = self._priority(queue_id, rule, message)
        allowance.spend(queue_id, allowance.now_ns() - began_ns)
        return priority

    def explain(self, seen: Facts, queue_ids: Iterable[str] | None = None) -> list[QueueOutcome]:
        """The outcomes of these queues, or all: matches first, each part by queue ID.

        Raises KeyError for an unknown queue.
        """
        message = context(seen)
        wanted = self._rules if queue_ids is None else dict.fromkeys(queue_ids)
        outcomes = [_explained(one, self._rules[one], message) for one in wanted]
        return sorted(outcomes, key=lambda outcome: (not outcome.matched, outcome.queue_id))

    def _priority(self, queue_id: str, rule: _Rule, message: cel.Context) -> int:
        if rule.priority is None:
            return DEFAULT_PRIORITY
        value = rule.priority.explain(message)[0]
        if value is None:
            self.fallbacks.append(queue_id)
            return rule.fallback_priority
        return value


def facts(headers: dict[str, str], fields: Fields, delay_ms: int, size: int) -> Facts:
    """A message of the log as expressions see it; a negative delay means none.

    It is visible from its visible time, the end of its own delay, or its receipt. The default delay
    of a queue is not a property of the message.
    """
    message_id, created_at_ms, received_at_ms, visible_at_ms, retention_s = fields
    visible_at_ms = visible_at_ms or received_at_ms + max(delay_ms, 0)
    return Facts(
        headers, created_at_ms, received_at_ms, size, visible_at_ms, retention_s, message_id
    )


def _priority(rule: _Rule, message: cel.Context) -> tuple[int, str]:
    if rule.priority is None:
        return DEFAULT_PRIORITY, "no priority is set"
    value, error = rule.priority.explain(message)
    source = rule.priority.checked.source
    if value is None:
        fallback = rule.fallback_priority
        return fallback, f"the priority {source} {error}: the fallback {fallback} holds"
    return value, f"by the priority {source}{error and f', {error}'}"


def explain_draft(
    queue_id: str,
    chosen: Filter,
    priority: Priority | None,
    fallback_priority: int,
    seen: Facts,
) -> QueueOutcome:
    """The outcome of a queue that need not exist."""
    return _explained(queue_id, _Rule(chosen, priority, fallback_priority), context(seen))


def _explained(queue_id: str, rule: _Rule, message: cel.Context) -> QueueOutcome:
    outcome: Outcome = rule.filter.explain(message)
    source = rule.filter.checked.source
    if outcome.matched:
        priority, why = _priority(rule, message)
        return QueueOutcome(queue_id, True, priority, f"the filter {source} holds; {why}")
    why = f"could not be evaluated: {outcome.error}" if outcome.error else "does not hold"
    return QueueOutcome(queue_id, False, DEFAULT_PRIORITY, f"the filter {source} {why}")
