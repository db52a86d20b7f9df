"""`slatemq access check --policy FILE`: a policy is tested before it is rolled out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slatemq.cli.access import policy_files
from slatemq.cli.app import invoke

POLICY = """\
roles:
  shop:
    - verbs: [publish]
      queues: ["orders"]
      when: headers.tenant in principal.tenants
    - verbs: [consume]
      queues: ["orders"]
bindings:
  - principals: [shop]
    roles: [shop]
"""


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY)
    return file


def check(policy: Path, *words: str) -> int:
    return invoke(["access", "check", "--policy", str(policy), *words])


TENANTS = ("--attribute", "tenants=a", "--attribute", "tenants=b")


def test_what_is_permitted_exits_with_0_and_says_by_which_rule(
    policy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = check(policy, "shop", "publish", "orders", "--header", "tenant=b", *TENANTS)

    out = capfd.readouterr().out
    assert code == 0
    assert out.splitlines()[:2] == [
        "permitted by roles.shop[0]",
        "  roles.shop[0], line 3, by bindings[0], line 9",
    ]
    assert 'headers.tenant = "b", principal.tenants = ["a", "b"]' in out


def test_a_list_may_have_one_value(policy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wanted = ("shop", "publish", "orders", "--header", "tenant=a")

    assert check(policy, *wanted, "--attribute", "tenants+=a") == 0
    assert 'principal.tenants = ["a"]' in capfd.readouterr().out
    both = ("--attribute", "tenants=b", "--attribute", "tenants+=a")
    assert check(policy, *wanted, *both) == 0
    assert 'principal.tenants = ["b", "a"]' in capfd.readouterr().out


def test_a_rule_of_an_alias_has_the_line_of_the_alias(
    policy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    policy.write_text(
        "roles:\n  base: &base\n    - verbs: [consume]\n  shop: *base\n"
        "bindings:\n  - {principals: [shop], roles: [shop]}\n"
    )

    assert check(policy, "shop", "consume", "orders") == 0
    assert "  roles.shop[0], line 4, by bindings[0], line 6" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "findings"),
    [
        (("shop", "publish", "orders", "--header", "tenant=c", *TENANTS), ["condition_false"]),
        (("shop", "publish", "orders", *TENANTS), ["condition_failed"]),
        (("shop", "consume", "bills"), ["other_queues"]),
        (("shop", "operate"), []),
        (("stranger", "consume", "orders"), []),
    ],
)
def test_what_is_not_permitted_exits_with_1_and_says_what_came_near(
    policy: Path, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], findings: list[str]
) -> None:
    code = check(policy, *words, "--json")

    found = json.loads(capfd.readouterr().out)
    assert code == 1
    assert not found["permitted"]
    assert [rule["finding"] for rule in found["rules"]] == findings


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("shop", "fly", "orders"), "'fly' is not one of"),
        (("shop", "operate", "orders"), "operate covers the whole instance"),
        (("shop", "consume", "orders", "--header", "a=b"), "--header is for the verb publish"),
        (("shop", "publish", "--header", "queue=orders"), "name the queue as QUEUE"),
        (("shop", "publish", "orders", "--attribute", "a"), "expected KEY=VALUE"),
        (("shop", "publish", "orders", "--attribute", "+=a"), "expected KEY=VALUE"),
        (("", "publish", "orders"), "1 to 255 printable characters"),
    ],
)
def test_bad_use_exits_with_2(
    policy: Path, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    assert check(policy, *words) == 2
    assert says in " ".join(capfd.readouterr().err.split())


def test_a_bad_file_is_refused_with_the_key_and_the_line(
    policy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    policy.write_text(POLICY.replace("[consume]", "[fly]"))

    assert check(policy, "shop", "consume", "orders") == 2
    err = capfd.readouterr().err
    assert "roles.shop[1].verbs[0]" in err
    assert f"line 6 of {policy}" in err
    assert check(policy.parent / "absent.yaml", "shop", "consume", "orders") == 2
    assert "cannot read" in capfd.readouterr().err


def test_without_the_packages_of_the_services_it_says_where_to_run(
    policy: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_files, "EXPLANATIONS", "libs_that_are_not_installed.explanations")

    assert check(policy, "shop", "consume", "orders") == 2
    assert "libs_that_are_not_installed is not installed" in capfd.readouterr().err
