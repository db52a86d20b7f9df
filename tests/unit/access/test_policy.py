"""Policies: what they permit, and how a bad one is refused."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.access.explanations import explain
from libs.access.policy import NO_LIMITS, Policy, Rights
from libs.access.principals import ANONYMOUS, Principal
from libs.access.verbs import VERBS, Verb
from libs.documents import Document
from libs.events.slatemq.headers import BACKEND_HEADERS
from slatemq._patterns import Pattern
from slatemq.errors import InvalidArgument

POLICY = """
roles:
  shop:
    - verbs: [publish]
      queues: ["orders", "orders-*"]
      when: headers.tenant == principal.tenant
    - verbs: [consume, inspect]
      queues: [receipts]
  operator:
    - verbs: [inspect, operate]
bindings:
  - principals: ["shop-*"]
    roles: [shop]
  - principals: [ops, shop-lead]
    roles: [operator]
"""

SHOP = Principal("shop-1", "token", {"tenant": "a"})


def rights(principal: Principal, text: str = POLICY) -> Rights:
    return Policy(Document("policy.yaml", text)).rights(principal)


@pytest.mark.parametrize(
    ("verb", "queue", "headers", "permitted"),
    [
        ("publish", "orders", {"tenant": "a"}, True),
        ("publish", "orders-eu", {"tenant": "a"}, True),
        ("publish", "orders", {"tenant": "b"}, False),
        ("publish", "orders", {}, False),
        ("publish", "other", {"tenant": "a"}, False),
        ("publish", "", {"tenant": "a"}, False),
        ("consume", "receipts", None, True),
        ("consume", "receipts2", None, False),
        ("administer", "receipts", None, False),
        ("operate", "", None, False),
    ],
)
def test_a_principal_may_do_what_a_rule_permits_and_nothing_else(
    verb: Verb, queue: str, headers: dict[str, str] | None, permitted: bool
) -> None:
    assert rights(SHOP).decide(verb, queue, headers).is_permitted is permitted


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", ["shop-1", "shop-lead", "stranger"])
def test_what_has_no_headers_is_permitted_as_it_is_decided(name: str, verb: Verb) -> None:
    judged = rights(Principal(name, "token", {"tenant": "a"}))

    for queue in ("", "orders", "orders-eu", "receipts", "other", "orders-".ljust(256, "x")):
        assert judged.permits(verb, queue) is judged.decide(verb, queue).is_permitted


def test_the_patterns_of_a_verb_are_those_of_all_rules_that_have_it() -> None:
    lead = rights(Principal("shop-lead", "token"))

    assert rights(SHOP).queue_patterns("inspect") == ("receipts",)
    assert lead.queue_patterns("inspect") == ("receipts", "*")
    assert lead.queue_patterns("publish") == ("orders", "orders-*")
    assert rights(ANONYMOUS).queue_patterns("inspect") == ()


def test_a_decision_names_its_rule_or_what_is_missing() -> None:
    shop = rights(SHOP)

    assert shop.decide("consume", "receipts").reason == "permitted by roles.shop[1]"
    assert shop.decide("publish", "orders", {"tenant": "b"}).reason == (
        "no rule permits 'shop-1' to publish to 'orders': the condition of roles.shop[0] is false"
    )
    assert "cannot be evaluated" in shop.decide("publish", "orders", {}).reason
    assert shop.decide("edit", "receipts").reason == ("no rule permits 'shop-1' to edit 'receipts'")


def test_a_message_without_a_queue_header_needs_the_pattern_of_all_queues() -> None:
    all_queues = "roles: {r: [{verbs: [publish]}]}\nbindings: [{principals: [p], roles: [r]}]"
    publisher = rights(Principal("p", "token"), all_queues)

    assert publisher.decide("publish", "", {}).is_permitted
    refused = rights(SHOP).decide("publish", "", {"tenant": "a"})
    assert not refused.is_permitted
    assert refused.reason == (
        "no rule permits 'shop-1' to publish a message without the header 'queue'"
    )


@pytest.mark.parametrize("header", BACKEND_HEADERS)
def test_what_event_queues_carry_needs_a_rule_for_all_queues_without_a_condition(
    header: str,
) -> None:
    text = """
roles:
  some: [{verbs: [publish], queues: ["orders", "slatemq*"]}]
  conditional: [{verbs: [publish], when: headers.tenant == principal.tenant}]
  every: [{verbs: [publish]}]
bindings:
  - {principals: [some], roles: [some]}
  - {principals: [conditional], roles: [conditional]}
  - {principals: [every], roles: [some, conditional, every]}
"""
    for name in ("some", "conditional", "every"):
        publisher = rights(Principal(name, "token", {"tenant": "a"}), text)
        sent = {"queue": "orders", "tenant": "a"}

        # Also where it was decided before about a message that is alike but for this header
        assert publisher.decide("publish", "orders", sent).is_permitted
        forging = publisher.decide("publish", "orders", {**sent, header: "slatemq"})
        assert forging.is_permitted is (name == "every")
        if not forging.is_permitted:
            assert "a rule for all queues, without `when`" in forging.reason


def test_the_rules_of_all_bindings_of_a_name_add_up() -> None:
    lead = rights(Principal("shop-lead", "token", {"tenant": "a"}))

    assert lead.decide("operate").is_permitted
    assert lead.decide("publish", "orders", {"tenant": "a"}).is_permitted


@pytest.mark.parametrize("verb", VERBS)
def test_who_is_not_bound_may_do_nothing(verb: Verb) -> None:
    for principal in (ANONYMOUS, Principal("stranger", "jwt")):
        assert not rights(principal).decide(verb, "receipts", {}).is_permitted
        assert not rights(principal).permits_some(verb)


@pytest.mark.parametrize(
    ("principals", "permitted"),
    [(["*"], False), (["a*"], False), (["anonymous"], True), (["*", "anonymous"], True)],
)
def test_a_caller_without_a_proof_is_bound_by_its_name_alone(
    principals: list[str], *, permitted: bool
) -> None:
    text = (
        f"roles: {{all: [{{verbs: [inspect]}}]}}\n"
        f"bindings: [{{principals: {json.dumps(principals)}, roles: [all]}}]\n"
    )
    policy = Policy(Document("policy.yaml", text))

    assert policy.rights(ANONYMOUS).decide("inspect", "orders").is_permitted is permitted
    assert explain(policy, ANONYMOUS, "inspect", "orders", {}).is_permitted is permitted
    if "anonymous" not in principals:
        assert policy.rights(Principal("alice", "jwt")).permits_some("inspect")


CONDITIONS = [
    "headers.tenant == principal.tenant",
    'has(headers.a) && headers["b"] != "x"',
    '"a" in headers ? headers.b == "x" : true',
    'headers.exists(key, headers[key] == "x")',
    'size(headers) < 2 || headers.a == "x"',
]


@given(
    conditions=st.lists(st.sampled_from(CONDITIONS), max_size=3),
    sent=st.lists(
        st.dictionaries(
            st.sampled_from(["tenant", "a", "b", "id"]), st.sampled_from(["a", "x", "y" * 300])
        ),
        max_size=8,
    ),
)
def test_a_message_is_judged_as_if_there_were_no_others(
    conditions: list[str], sent: list[dict[str, str]]
) -> None:
    rules = [{"verbs": ["publish"], "queues": ["q"], "when": one} for one in conditions]
    bindings = [{"principals": ["shop-1"], "roles": ["r"]}]
    text = json.dumps({"roles": {"r": rules}, "bindings": bindings})
    shop = rights(SHOP, text)

    for headers in sent:
        assert shop.decide("publish", "q", headers) == shop.evaluate("publish", "q", headers)


def test_an_attribute_cannot_take_the_place_of_the_name() -> None:
    text = """
roles: {r: [{verbs: [publish], when: 'principal.name == "root"'}]}
bindings: [{principals: ["*"], roles: [r]}]
"""
    forger = rights(Principal("forger", "jwt", {"name": "root"}), text)

    assert not forger.decide("publish", "q", {}).is_permitted


@given(
    pattern=st.text(alphabet="ab*.\n", max_size=8),
    text=st.text(alphabet="ab.\n", max_size=8),
)
def test_patterns_match_as_a_shell_does_with_the_star_alone(pattern: str, text: str) -> None:
    assert Pattern([pattern]).matches(text) == fnmatchcase(text, pattern)


def test_a_text_that_nearly_matches_at_every_place_is_looked_at_once() -> None:
    # A way that tries all places for each part has 10^20 of them to try.
    near = Pattern(["*a*a*a*a*b", "*-eu-*-eu-*-eu-*-dlq", "a*a*a*a*ab*b"])

    assert not near.matches("a" * 100_000)
    assert not near.matches("-eu-" * 100_000)
    assert near.matches("-eu-" * 100_000 + "-dlq")


@pytest.mark.parametrize("verb", ["inspect", "publish"])
def test_a_name_that_no_queue_can_have_needs_a_rule_for_all_queues(verb: Verb) -> None:
    text = """
roles:
  some: [{verbs: [inspect, publish], queues: ["orders-*", "*-eu-*-dlq"]}]
  every: [{verbs: [inspect, publish]}]
bindings:
  - {principals: [some], roles: [some]}
  - {principals: [every], roles: [every]}
"""
    some, every = (rights(Principal(name, "token"), text) for name in ("some", "every"))
    longest, too_long = ("orders-".ljust(length, "x") for length in (255, 256))

    for headers in (None, {"queue": too_long}):
        assert some.decide(verb, longest, headers).is_permitted
        assert every.decide(verb, too_long, headers).is_permitted
        refused = some.decide(verb, too_long, headers)
        assert not refused.is_permitted
        assert "a queue whose name has more than 255 characters" in refused.reason
        assert too_long not in refused.reason


@pytest.mark.parametrize(
    ("text", "field", "line"),
    [
        ("roles: {r: [{verbs: [fly]}]}", "roles.r[0].verbs[0]", 1),
        ("roles:\n  r:\n    - verbs: []", "roles.r[0].verbs", 3),
        ("roles:\n  r:\n    - verbs: [publish]\n      when: headers.x +", "roles.r[0].when", 4),
        ("roles:\n  r:\n    - verbs: [publish]\n      when: # it was here", "roles.r[0].when", 4),
        ("roles:\n  r: [&a {verbs: [publish]}, {<<: *a, when: null}]", "roles.r[1].when", 2),
        ("limits:\n  - principals: [p]\n    calls_per_s:", "limits[0].calls_per_s", 3),
        ("roles:\n  r:\n    - verbs: [publish]\n      when: nothing", "roles.r[0].when", 4),
        ("roles:\n  r:\n    - verbs: [consume]\n      when: 'true'", "roles.r[0].when", 4),
        ("roles:\n  r:\n    - {verbs: [operate], queues: [q]}", "roles.r[0].queues", 3),
        ("roles:\n  r:\n    - {verbs: [inspect, operate], queues: [q]}", "roles.r[0].queues", 3),
        ("roles:\n  r:\n    - {verbs: [operate], queue: q}", "roles.r[0]", 3),
        ("bindings:\n  - {principals: [p], roles: [absent]}", "bindings[0].roles[0]", 2),
        ("roles: []", "roles", 1),
        ("rules: []", "rules", 1),
        ("roles: {}\ncertificates: [1]", "certificates[0]", 2),
        ("roles:\n  r: []\n  r: []", "roles.r", 2),
    ],
)
def test_a_bad_policy_is_refused_with_its_key_and_line(text: str, field: str, line: int) -> None:
    with pytest.raises(InvalidArgument) as caught:
        rights(SHOP, text)

    assert caught.value.field == field
    assert f"line {line} of policy.yaml" in caught.value.description or (
        f"in lines {line} and" in caught.value.description
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- a",
        "a: [",
        "\0",
        "a: !!python/object:x {}",
        "[" * 1000,
        "a: !!bool x",
        "a: !!int ''",
        "a: !!timestamp x",
    ],
)
def test_what_is_not_a_mapping_in_yaml_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"policy\.yaml"):
        rights(SHOP, text)


def test_a_policy_of_aliases_of_aliases_and_of_keys_with_brackets_is_refused_at_once() -> None:
    lists = [
        "a: &a [0]",
        *(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]" for a, b in pairwise("abcdefgh")),
    ]
    for text in ("\n".join(lists), 'roles:\n  <<: {"a]": 5}\n'):
        with pytest.raises(InvalidArgument):
            rights(SHOP, text)


@pytest.mark.parametrize(
    "text",
    [
        POLICY.partition("  - principals")[0],
        "roles:\nbindings:\n",
        "roles:\n  shop:\nbindings:\n  - {principals: ['*'], roles: [shop]}\n",
    ],
    ids=["bindings", "both", "rules of a role"],
)
def test_what_is_left_once_lines_are_removed_permits_nothing(text: str) -> None:
    principal = Principal("shop-lead", "token", {"tenant": "a"})
    assert rights(principal).permits_some("publish")

    assert not any(rights(principal, text).permits_some(verb) for verb in VERBS)


def test_names_of_certificates_and_limits_that_are_removed_are_none() -> None:
    text = "certificates:\nlimits:\n"
    policy = Policy(Document("policy.yaml", text))

    assert not policy.certificates.matches("shop-1")
    assert policy.limits(SHOP) is NO_LIMITS
    assert Policy(Document("policy.yaml", "roles: {}")).certificates.matches("shop-1")


def test_an_unknown_verb_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(InvalidArgument, match="'fly' is not a verb; the verbs are publish,"):
        rights(SHOP, "roles: {r: [{verbs: [fly]}]}")
