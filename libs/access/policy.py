"""What principals may do: roles of verbs on queues, bound to names.

As in::

    roles:
      shop:
        - verbs: [publish]
          queues: ["orders", "orders-*"]
          when: headers.tenant == principal.tenant
        - verbs: [consume, inspect]
          queues: ["receipts"]
      operator:
        - verbs: [inspect, operate]
    bindings:
      - principals: ["shop", "system:serviceaccount:shop:*"]
        roles: [shop]
    limits:
      - principals: ["shop"]
        publish_messages_per_s: 1000
        open_streams: 20
    certificates: ["shop", "*.workers.example.com"]

Nothing is permitted but by a rule, and nothing limited but by a limit. A `*` in a pattern stands
for any number of characters. Bindings have `anonymous`, a caller without a proof, by that name
alone: `*` is all that are known. `certificates` are the names in client certificates that become
principals; without it, all of them.

What event queues on SlateMQ carry is published as messages with headers of their own: a forged task
would be a publish of any message. So only a rule for all queues, without a condition, permits to
publish those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Final

import msgspec

from libs.access.principals import ANONYMOUS, Principal
from libs.access.verbs import VERBS, Verb
from libs.documents import Document
from libs.events.slatemq.headers import BACKEND_HEADERS
from libs.filters import Filter, FilterError, Outcome
from libs.filters.engine import cel
from libs.filters.signatures import Type
from slatemq._patterns import Pattern

VARIABLES: Final[dict[str, Type]] = {
    "headers": ("map", "string", "string"),
    "principal": ("map", "string", "dyn"),
}
"""What a condition reads: the headers of a message, and the caller's name and attributes."""

Facts = dict[str, str | list[str]]
"""What conditions read of a principal."""

DECISIONS_KEPT: Final = 4_096
"""Decisions about messages, of all principals together."""

KEPT_CHARACTERS_MAX: Final = 256
"""In what a kept decision rests on: so all of them take a few megabytes at most."""

QUEUE_LENGTH_MAX: Final = 255
"""No queue has a longer name. One that a caller gives all the same is judged as no name: only a
rule for all queues covers it."""

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]


class _Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    verbs: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    queues: Annotated[tuple[_Text, ...], msgspec.Meta(min_length=1)] = ("*",)
    when: str | None = None


class _Binding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    principals: Annotated[tuple[_Text, ...], msgspec.Meta(min_length=1)]
    roles: Annotated[tuple[_Text, ...], msgspec.Meta(min_length=1)]


_Count = Annotated[int, msgspec.Meta(ge=1, le=10**12)]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one principal may take of one process. None does not limit.

    Attributes:
        principals: The patterns of the names that have these limits.
        publish_messages_per_s: Published messages a second; a burst may have one second's.
        publish_bytes_per_s: Bytes of published payloads and headers a second, likewise.
        calls_per_s: Calls a second, but for publishes; one that opens a stream counts once.
        waiting_claims: Calls at once that claim messages, whether they find some or wait, or that
            wait for tasks.
        open_streams: Streams at once, of all kinds: those that claim count here alone.
        in_flight: Messages in flight that it has claimed since the start of the process.
        queues: Queues that are its own: those whose filter or priority it was the last to set, as
            who creates a queue does.
        filter_cost: What the filter and the priority of one such queue may cost together; see
            `libs.filters.Checked.cost`.
        filter_cost_sum: The same of all such queues.
    """

    principals: tuple[_Text, ...] = ()
    publish_messages_per_s: _Count | None = None
    publish_bytes_per_s: _Count | None = None
    calls_per_s: _Count | None = None
    waiting_claims: _Count | None = None
    open_streams: _Count | None = None
    in_flight: _Count | None = None
    queues: _Count | None = None
    filter_cost: _Count | None = None
    filter_cost_sum: _Count | None = None

    @property
    def entry(self) -> str:
        """What metrics call these limits: the first of the patterns."""
        return self.principals[0] if self.principals else ""


class _LimitsEntry(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    principals: Annotated[tuple[_Text, ...], msgspec.Meta(min_length=1)]


NO_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether something is permitted, and why.

    Attributes:
        is_permitted: Whether it is.
        reason: The rule that permits it, or what is missing.
    """

    is_permitted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a role.

    Attributes:
        place: Where it is in the file, as in `roles.shop[0]`.
        line: Its line in the file.
        verbs: What it permits.
        queue_patterns: The patterns of the queues.
        queues: The same, to match them.
        condition: What the headers of a published message must meet; None: nothing.
    """

    place: str
    line: int
    verbs: frozenset[str]
    queue_patterns: tuple[str, ...]
    queues: Pattern
    condition: Filter | None

    def covers(self, verb: Verb, queue: str, headers: Mapping[str, str] | None = None) -> bool:
        """Whether it is about this verb on this queue, conditions aside."""
        if verb not in self.verbs:
            return False
        if _is_of_event_queues(verb, headers):
            return self.condition is None and self.queues.matches("")
        return verb == "operate" or self.queues.matches(_possible(queue))

    def judge(self, headers: Mapping[str, str] | None, facts: Facts) -> Outcome:
        """Whether its condition is met; it counts as met where the headers are not known."""
        if self.condition is None or headers is None:
            return Outcome(True)
        known = cel.Context({"headers": dict(headers), "principal": facts})
        return self.condition.explain(known)


@dataclass(frozen=True, slots=True)
class Binding:
    """Roles that principals have.

    Attributes:
        place: Where it is in the file, as in `bindings[0]`.
        line: Its line in the file.
        principals: The patterns of their names.
        has_anonymous: Whether callers without a proof have them.
        roles: The names of the roles.
        rules: Those of all its roles.
    """

    place: str
    line: int
    principals: Pattern
    has_anonymous: bool
    roles: tuple[str, ...]
    rules: tuple[Rule, ...]

    def names(self, principal: Principal) -> bool:
        """Whether the principal has them."""
        if principal.name == ANONYMOUS.name:
            return self.has_anonymous
        return self.principals.matches(principal.name)


class Policy:
    """The rules of a file.

    Attributes:
        certificates: Of the names in client certificates that are principals.
    """

    def __init__(self, document: Document) -> None:
        """Check all of it.

        Raises:
            InvalidArgument: Something of it is wrong; names the key and the line.
        """
        values = document.values
        for key in values:
            if key not in ("roles", "bindings", "limits", "certificates"):
                problem = "unknown; a policy has `roles`, `bindings`, `limits` and `certificates`"
                raise document.error(str(key), problem)
        roles = document.convert("roles", document.get("roles", {}), dict[str, Any])
        self._roles = {name: _rules(document, name, rules) for name, rules in roles.items()}
        bindings = document.convert("bindings", document.get("bindings", []), tuple[_Binding, ...])
        self._bindings: list[Binding] = []
        for number, binding in enumerate(bindings):
            for place, role in enumerate(binding.roles):
                if role not in self._roles:
                    path = f"bindings[{number}].roles[{place}]"
                    raise document.error(path, f"there is no role {role!r}")
            path = f"bindings[{number}]"
            rules = tuple(rule for role in binding.roles for rule in self._roles[role])
            names = Pattern(binding.principals)
            self._bindings.append(
                Binding(
                    path,
                    document.line(path),
                    names,
                    ANONYMOUS.name in binding.principals,
                    binding.roles,
                    rules,
                )
            )
        limits = document.convert("limits", document.get("limits", []), tuple[_LimitsEntry, ...])
        self._limits = [(Pattern(entry.principals), entry) for entry in limits]

        self._decisions: Decisions = lru_cache(DECISIONS_KEPT)(_decision)
        certificates = document.get("certificates", []) if "certificates" in values else ["*"]
        self.certificates = Pattern(
            document.convert("certificates", certificates, tuple[_Text, ...])
        )

    def limits(self, principal: Principal) -> Limits:
        """The limits of the first entry that has the principal's name."""
        for names, limits in self._limits:
            if names.matches(principal.name):
                return limits
        return NO_LIMITS

    def rights(self, principal: Principal) -> Rights:
        """What a principal may do. Worth keeping: making it looks at every binding."""
        rules: dict[str, Rule] = {}
        for binding in self.bindings_of(principal):
            rules.update((rule.place, rule) for rule in binding.rules)
        return Rights(principal, tuple(rules.values()), self._decisions)

    def bindings_of(self, principal: Principal) -> list[Binding]:
        """The bindings that have the principal's name."""
        return [one for one in self._bindings if one.names(principal)]


class Rights:
    """What one principal may do.

    Evaluating a condition takes longer than all else that a policy costs a call. So what
    was decided for a message is kept, by the values of the headers that conditions read: messages
    with other headers that are alike in these need no second evaluation.

    Attributes:
        condition_cost: How many steps all conditions take at most for one message.
    """

    def __init__(self, principal: Principal, rules: Sequence[Rule], decisions: Decisions) -> None:
        """`decisions` caches some results of `_decision`."""
        self.principal = principal
        self._rules = rules
        self._facts = facts_of(principal)
        self._decisions = decisions
        self._keys = _keys_read(rules)
        conditions = [rule.condition for rule in rules if rule.condition is not None]
        self.condition_cost = sum(condition.checked.cost for condition in conditions)
        self._queues: dict[Verb, Pattern] = {}

    def decide(
        self, verb: Verb, queue: str = "", headers: Mapping[str, str] | None = None
    ) -> Decision:
        """Whether the principal may do this.

        Args:
            verb: What it wants to do.
            queue: The queue. When it publishes, the one that the header `queue` names; empty for a
                message without that header, which any queue's filter may take: only the pattern `*`
                matches it, as for a name that is too long.
            headers: Of the published messages, for the conditions. None, where they are not known:
                a rule with a condition counts as one that permits.
        """
        if headers is None or self._keys is None:
            return self.evaluate(verb, queue, headers)
        read = tuple([(key, headers[key]) for key in self._keys if key in headers])
        if len(queue) + sum([len(value) for _, value in read]) > KEPT_CHARACTERS_MAX:
            return self.evaluate(verb, queue, headers)
        return self._decisions(self, verb, queue, read)

    def permits(self, verb: Verb, queue: str) -> bool:
        """The decision about what has no headers, without its reason: at a tenth of the price."""
        queues = self._queues.get(verb)
        if queues is None:
            queues = self._queues[verb] = Pattern(self.queue_patterns(verb))
        return queues.matches(_possible(queue))

    def evaluate(self, verb: Verb, queue: str, headers: Mapping[str, str] | None) -> Decision:
        """The decision by the rules alone, without the cache of `decide`."""
        problems = []
        for rule in self._rules:
            if not rule.covers(verb, queue, headers):
                continue
            outcome = rule.judge(headers, self._facts)
            if outcome.matched:
                return Decision(True, f"permitted by {rule.place}{_unknown(rule, headers)}")
            problem = f"cannot be evaluated: {outcome.error}" if outcome.error else "is false"
            problems.append(f"the condition of {rule.place} {problem}")
        reason = f"no rule permits {self.principal.name!r} to {verb}{_object(verb, queue)}"
        if _is_of_event_queues(verb, headers):
            named = " or ".join(BACKEND_HEADERS)
            reason += f" with the header {named}: that takes a rule for all queues, without `when`"
        return Decision(False, f"{reason}: {'; '.join(problems)}" if problems else reason)

    def permits_any_message(self, queue: str) -> bool:
        """Whether the principal may publish to a queue whatever headers the message has."""
        return any(one.covers("publish", queue) and one.condition is None for one in self._rules)

    @property
    def permits_anything(self) -> bool:
        """Whether there is anything that the principal may do."""
        return bool(self._rules)

    def permits_some(self, verb: Verb) -> bool:
        """Whether there is any queue on which the principal may do this."""
        return any(verb in rule.verbs for rule in self._rules)

    def queue_patterns(self, verb: Verb) -> tuple[str, ...]:
        """The queues on which the principal may do this, each pattern once."""
        rules = (rule for rule in self._rules if verb in rule.verbs)
        return tuple(dict.fromkeys(pattern for rule in rules for pattern in rule.queue_patterns))


Decisions = Callable[[Rights, Verb, str, tuple[tuple[str, str], ...]], Decision]


def _decision(
    rights: Rights, verb: Verb, queue: str, read: tuple[tuple[str, str], ...]
) -> Decision:
    """What rights say about a message of which no more headers than these are read."""
    return rights.evaluate(verb, queue, dict(read))


def _keys_read(rules: Sequence[Rule]) -> tuple[str, ...] | None:
    """The keys of headers that are judged; None: some conditions read headers in another way."""
    keys: set[str] = set(BACKEND_HEADERS)
    for rule in rules:
        if rule.condition is None:
            continue
        if rule.condition.checked.keys is None:
            return None
        keys |= rule.condition.checked.keys
    return tuple(keys)


def facts_of(principal: Principal) -> Facts:
    """What conditions read of a principal; no attribute takes the place of the name."""
    return {**principal.attributes, "name": principal.name}


def _is_of_event_queues(verb: Verb, headers: Mapping[str, str] | None) -> bool:
    """Whether it is to publish a message that may be taken for a task or an event."""
    if verb != "publish" or headers is None:
        return False
    return any(name in headers for name in BACKEND_HEADERS)


def _possible(queue: str) -> str:
    """The name, or none where no queue can have it."""
    return queue if len(queue) <= QUEUE_LENGTH_MAX else ""


def _object(verb: Verb, queue: str) -> str:
    """The queue behind a verb, in a sentence."""
    if not queue:
        return " a message without the header 'queue'" if verb == "publish" else ""
    if not _possible(queue):
        of = " to" if verb == "publish" else ""
        return f"{of} a queue whose name has more than {QUEUE_LENGTH_MAX} characters"
    return f" to {queue!r}" if verb == "publish" else f" {queue!r}"


def _unknown(rule: Rule, headers: Mapping[str, str] | None) -> str:
    if rule.condition is None or headers is not None:
        return ""
    return f" where {rule.condition.checked.source}"


def _rules(document: Document, name: str, rules: object) -> list[Rule]:
    made = []
    listed = [] if rules is None else rules
    for number, rule in enumerate(document.convert(f"roles.{name}", listed, tuple[_Rule, ...])):
        place = f"roles.{name}[{number}]"
        for at, verb in enumerate(rule.verbs):
            if verb not in VERBS:
                problem = f"{verb!r} is not a verb; the verbs are {', '.join(VERBS)}"
                raise document.error(f"{place}.verbs[{at}]", problem)
        condition = None
        if rule.when is not None:
            if set(rule.verbs) != {"publish"}:
                problem = "only a rule whose one verb is `publish` has a condition"
                raise document.error(f"{place}.when", problem)
            try:
                condition = Filter(rule.when, VARIABLES)
            except FilterError as error:
                raise document.error(f"{place}.when", str(error)) from error
        if "operate" in rule.verbs and rule.queues != ("*",):
            problem = "`operate` covers the whole instance: give it a rule without queues"
            raise document.error(f"{place}.queues", problem)
        made.append(
            Rule(
                place,
                document.line(place),
                frozenset(rule.verbs),
                rule.queues,
                Pattern(rule.queues),
                condition,
            )
        )
    return made
