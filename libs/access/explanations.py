"""Why a policy permits something or does not: what each rule says that is about the verb.

For people who write policies; calls are judged by `Rights.decide`, whose rules these are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from libs.access.policy import Policy, Rule, facts_of
from libs.access.principals import Attributes, Principal
from libs.access.verbs import Verb
from libs.documents import Document
from libs.events.slatemq.headers import BACKEND_HEADERS
from libs.filters import load_parser
from libs.filters.conditions import key_of
from libs.filters.syntax import Node
from slatemq.models import AccessRule

Finding = Literal["permits", "other_queues", "condition_false", "condition_failed"]

VALUE_LENGTH_MAX = 100


@dataclass(frozen=True, slots=True)
class Explanation:
    """Whether something is permitted, and why.

    Attributes:
        is_permitted: Whether it is.
        reason: Why, in a sentence.
        rules: Those with the verb that the principal has. The last is the one that permits it.
        roles: That are bound to the principal.
    """

    is_permitted: bool
    reason: str
    rules: tuple[AccessRule, ...]
    roles: tuple[str, ...]


def explain(
    policy: Policy,
    principal: Principal,
    verb: Verb,
    queue: str,
    headers: Mapping[str, str],
) -> Explanation:
    """The judgement of `Rights.decide`, with what each rule says up to the one that permits it.

    `headers` are those of a message to publish, without the header `queue`.
    """
    if queue:
        headers = {**headers, "queue": queue}
    rights = policy.rights(principal)
    decision = rights.decide(verb, queue, headers)
    bindings = policy.bindings_of(principal)
    verdicts: dict[str, AccessRule] = {}
    for binding, rule in ((one, rule) for one in bindings for rule in one.rules):
        if verb not in rule.verbs or rule.place in verdicts:
            continue
        finding, detail = _judged(rule, principal, verb, queue, headers)
        verdicts[rule.place] = AccessRule(
            rule.place, rule.line, binding.place, binding.line, finding, detail
        )
        if finding == "permits":
            break
    roles = dict.fromkeys(role for binding in bindings for role in binding.roles)
    reason = decision.reason
    if not roles:
        reason = f"no binding names {principal.name!r}, and nothing is permitted but by a rule"
    return Explanation(decision.is_permitted, reason, tuple(verdicts.values()), tuple(roles))


def judge_file(
    file: Path,
    principal: str,
    verb: Verb,
    queue: str,
    headers: Mapping[str, str],
    attributes: Attributes,
) -> Explanation:
    """What a policy file permits a principal. Raises InvalidArgument with the key and the line."""
    policy = Policy(Document.read(file))
    return explain(policy, Principal(principal, "none", attributes), verb, queue, headers)


def _judged(
    rule: Rule, principal: Principal, verb: Verb, queue: str, headers: Mapping[str, str]
) -> tuple[Finding, str]:
    queues = ", ".join(rule.queue_patterns)
    if not rule.covers(verb, queue, headers):
        if rule.covers(verb, queue):
            named = " or ".join(BACKEND_HEADERS)
            return "condition_false", f"no header {named}, unless it is for all queues without when"
        return "other_queues", queues
    if rule.condition is None:
        return "permits", queues
    facts = facts_of(principal)
    outcome = rule.judge(headers, facts)
    source = rule.condition.checked.source
    values = dict.fromkeys(_values(load_parser()(source), {"headers": headers, "principal": facts}))
    detail = f"{source}, with {', '.join(values)}" if values else source
    if outcome.matched:
        return "permits", detail
    return "condition_failed" if outcome.error else "condition_false", detail


def _values(node: Node, known: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
    """What a condition reads, with its values, as in `headers.tenant = "b"`."""
    for name, values in known.items():
        key = key_of(node, name)
        if key is not None:
            yield f"{name}.{key} {_shown(values[key]) if key in values else 'absent'}"
    for part in node.parts:
        yield from _values(part, known)


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return f"= {text if len(text) <= VALUE_LENGTH_MAX else text[:VALUE_LENGTH_MAX] + '…'}"
