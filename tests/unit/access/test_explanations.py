"""Why a policy permits something or does not: explained by the rules that judge calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.access.explanations import Explanation, explain
from libs.access.policy import Policy
from libs.access.principals import Principal
from libs.access.verbs import VERBS, Verb
from libs.documents import Document
from libs.events.slatemq.headers import BACKEND_HEADERS
from slatemq.models import AccessRule

POLICY = Policy(
    Document(
        "policy.yaml",
        """
roles:
  shop:
    - verbs: [publish]
      queues: ["orders", "orders-*"]
      when: headers.tenant == principal.tenant
    - verbs: [consume, inspect]
      queues: [receipts]
  reader:
    - verbs: [inspect]
      queues: ["*"]
  operator:
    - verbs: [operate]
bindings:
  - principals: ["shop-*"]
    roles: [shop]
  - principals: [ops, shop-lead]
    roles: [reader, shop, operator]
""",
    )
)
TENANT_A = {"tenant": "a"}


def judged(
    name: str,
    verb: Verb,
    queue: str = "",
    headers: dict[str, str] | None = None,
    attributes: dict[str, str | list[str]] | None = None,
) -> Explanation:
    principal = Principal(name, "none", attributes or {})
    return explain(POLICY, principal, verb, queue, headers or {})


def test_what_is_permitted_names_the_rule_and_the_binding_with_their_lines() -> None:
    found = judged("shop-1", "consume", "receipts")

    assert found.is_permitted
    assert found.reason == "permitted by roles.shop[1]"
    assert found.rules == (
        AccessRule("roles.shop[1]", 7, "bindings[0]", 15, "permits", "receipts"),
    )


def test_a_condition_is_shown_with_the_values_that_it_read() -> None:
    met = judged("shop-1", "publish", "orders", TENANT_A, dict(TENANT_A))
    false = judged("shop-1", "publish", "orders", TENANT_A, {"tenant": ["a", "b"]})
    failed = judged("shop-1", "publish", "orders", {}, dict(TENANT_A))

    condition = "headers.tenant == principal.tenant, with "
    assert [(one.finding, one.detail) for one in (*met.rules, *false.rules, *failed.rules)] == [
        ("permits", condition + 'headers.tenant = "a", principal.tenant = "a"'),
        ("condition_false", condition + 'headers.tenant = "a", principal.tenant = ["a", "b"]'),
        ("condition_failed", condition + 'headers.tenant absent, principal.tenant = "a"'),
    ]
    assert (met.is_permitted, false.is_permitted, failed.is_permitted) == (True, False, False)


def test_long_values_are_cut() -> None:
    (rule,) = judged("shop-1", "publish", "orders", {"tenant": "x" * 5000}, dict(TENANT_A)).rules

    assert len(rule.detail) < 300
    assert "x…" in rule.detail


def test_rules_of_the_verb_for_other_queues_come_near_and_others_do_not() -> None:
    found = judged("shop-1", "consume", "orders")

    assert not found.is_permitted
    assert found.reason == "no rule permits 'shop-1' to consume 'orders'"
    assert [(one.place, one.finding, one.detail) for one in found.rules] == [
        ("roles.shop[1]", "other_queues", "receipts")
    ]


def test_having_no_binding_and_having_no_rule_of_the_verb_are_distinguished() -> None:
    stranger = judged("stranger", "edit", "orders")
    shop = judged("shop-1", "edit", "orders")

    assert (stranger.roles, stranger.rules) == ((), ())
    assert stranger.reason.startswith("no binding names 'stranger'")
    assert (shop.roles, shop.rules) == (("shop",), ())
    assert "no rule permits" in shop.reason


def test_a_rule_that_two_bindings_give_is_shown_once_and_nothing_behind_the_decision() -> None:
    lead = judged("shop-lead", "inspect", "receipts")

    assert lead.roles == ("shop", "reader", "operator")
    assert [one.place for one in lead.rules] == ["roles.shop[1]"]
    other = judged("shop-lead", "inspect", "bills")
    assert [one.place for one in other.rules] == ["roles.shop[1]", "roles.reader[0]"]
    assert other.rules[-1].finding == "permits"


@given(
    name=st.sampled_from(["shop-1", "shop-lead", "ops", "stranger"]),
    verb=st.sampled_from(list(VERBS)),
    queue=st.sampled_from(["", "orders", "orders-eu", "receipts", "bills"]),
    tenant=st.sampled_from([None, "a", "b"]),
)
def test_an_explanation_decides_as_calls_are_judged(
    name: str, verb: Verb, queue: str, tenant: str | None
) -> None:
    headers = {} if tenant is None else {"tenant": tenant}
    principal = Principal(name, "token", dict(TENANT_A))

    found = explain(POLICY, principal, verb, queue, headers)

    sent = {**headers, "queue": queue} if queue else headers
    assert found.is_permitted is POLICY.rights(principal).decide(verb, queue, sent).is_permitted
    assert found.is_permitted is any(one.finding == "permits" for one in found.rules)


@pytest.mark.parametrize("header", BACKEND_HEADERS)
def test_a_rule_that_is_not_for_what_event_queues_carry_says_so(header: str) -> None:
    found = judged("shop-1", "publish", "orders", {header: "x", "tenant": "a"})

    assert not found.is_permitted
    (rule,) = found.rules
    assert rule.finding == "condition_false"
    assert header in rule.detail


@pytest.mark.parametrize("queue", ["", "bills"])
def test_operate_is_about_no_queue(queue: str) -> None:
    assert judged("ops", "operate", queue).is_permitted
