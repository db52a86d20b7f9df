"""Static tokens with wrong secrets: how many are checked, and that the right one gets in."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from libs.access import token_checks
from libs.access.authentication import Authenticator
from libs.access.principals import Principal
from libs.access.token_checks import PROMPT_MAX, address_of
from libs.access.token_file import TokenEntry
from slatemq._tokens import NewToken, new_token
from slatemq.errors import ResourceExhausted, Unauthenticated
from tests.unit.access.access_files import Files, bearer


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


async def kinds_of(*proofs: Coroutine[Any, Any, object]) -> Counter[type]:
    """What became of proofs that are asked for at once."""
    return Counter(type(one) for one in await asyncio.gather(*proofs, return_exceptions=True))


def forged(made: NewToken, count: int) -> list[str]:
    """Tokens with the ID of a good one, and with secrets that are wrong."""
    return [bearer(f"smq_{made.entry['id']}_{number:040}") for number in range(count)]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tokens that were hashed with scrypt."""
    found: list[str] = []
    matches = TokenEntry.matches

    def recorded(self: TokenEntry, token: str) -> bool:
        found.append(token)
        return matches(self, token)

    monkeypatch.setattr(TokenEntry, "matches", recorded)
    return found


async def test_a_flood_of_forged_tokens_waits_within_bounds(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [new_token("shop") for _ in range(8)]
    files.write(*made)
    authenticator = files.authenticator()
    monkeypatch.setattr(token_checks, "WAITING_MAX", 3)

    kinds = await kinds_of(*(authenticator.prove(forged(one, 1)[0]) for one in made))

    assert kinds == {ResourceExhausted: 5, Unauthenticated: 3}
    assert (await authenticator.prove(bearer(made[0].token))).made.name == "shop"


async def test_wrong_secrets_cost_no_check_once_the_right_one_has_come(
    files: Files, checked: list[str]
) -> None:
    made, changed = new_token("shop"), new_token("shop")
    changed.entry["id"] = made.entry["id"]
    files.write(made)
    authenticator = files.authenticator()
    good = bearer(made.token)

    # Given many calls with the right one at once, and then many with wrong ones
    await asyncio.gather(*(authenticator.prove(good) for _ in range(50)))
    assert await kinds_of(*map(authenticator.prove, forged(made, 100))) == {Unauthenticated: 100}
    authenticator.forget()
    await authenticator.prove(good)
    assert checked == [made.token]

    # When the file has another secret for the ID
    files.write(changed)
    assert files.reloaded is not None
    assert files.reloaded.reload()
    authenticator.forget()

    with pytest.raises(Unauthenticated):
        await authenticator.prove(good)
    assert checked == [made.token, made.token]


class Attacker:
    """Asks for proofs of the ID of a token, with secrets that are wrong."""

    def __init__(self, authenticator: Authenticator[Principal], made: NewToken) -> None:
        self._authenticator = authenticator
        self._wrong = iter(forged(made, 10_000))

    def ask(self, host: int = 1) -> Coroutine[Any, Any, object]:
        return self._authenticator.prove(next(self._wrong), lambda: f"ipv4:10.0.0.{host}:1")

    async def flood(self) -> None:
        """Ask until there is a line."""
        kinds = await kinds_of(*(self.ask() for _ in range(30)))
        assert kinds == {Unauthenticated: PROMPT_MAX, ResourceExhausted: 30 - PROMPT_MAX}

    async def go_on(self, host: int) -> None:
        """Ask again and again."""
        while True:
            await kinds_of(self.ask(host))


async def test_few_wrong_secrets_of_an_id_are_checked_and_others_do_not_wait(
    files: Files, checked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, other = new_token("shop"), new_token("other")
    files.write(made, other)
    authenticator = files.authenticator()
    attacker = Attacker(authenticator, made)
    await attacker.flood()

    # Then its line has one of each address, which is checked in its turn
    monkeypatch.setattr(token_checks, "PACE_S", 3600)
    assert await kinds_of(attacker.ask()) == {Unauthenticated: 1}
    waiting = asyncio.create_task(attacker.ask())
    await asyncio.sleep(0)
    for _ in range(30):
        with pytest.raises(ResourceExhausted) as refused:
            await attacker.ask()
        assert refused.value.retry_after_ms == 3_600_000
    assert len(checked) == PROMPT_MAX + 1

    # And other IDs do not wait
    assert (await authenticator.prove(bearer(other.token))).made.name == "other"
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_the_right_secret_gets_in_while_others_ask_with_wrong_ones(
    files: Files, checked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = new_token("shop")
    files.write(made)
    authenticator = files.authenticator()
    attacker = Attacker(authenticator, made)
    await attacker.flood()
    monkeypatch.setattr(token_checks, "PACE_S", 0.01)

    attacks = [asyncio.create_task(attacker.go_on(host)) for host in range(3)]
    while len(checked) < PROMPT_MAX + 3:
        await asyncio.sleep(0.001)
    before = len(checked)
    proof = await authenticator.prove(bearer(made.token), lambda: "ipv4:10.0.1.1:1")
    after = len(checked)
    for one in attacks:
        one.cancel()
    await asyncio.wait(attacks)

    # It has its turn behind those that were there, and each of those has one place.
    assert proof.made.name == "shop"
    assert after - before <= 4


async def test_a_check_counts_whose_call_is_cancelled(files: Files, checked: list[str]) -> None:
    made = new_token("shop")
    files.write(made)
    authenticator = files.authenticator()

    for number, token in enumerate(forged(made, PROMPT_MAX), 1):
        check = asyncio.create_task(authenticator.prove(token))
        while len(checked) < number:
            await asyncio.sleep(0.001)
        check.cancel()
        await asyncio.wait([check])

    async def burst() -> Counter[type]:
        return await kinds_of(*map(authenticator.prove, forged(made, 10)))

    assert await burst() == {Unauthenticated: 1, ResourceExhausted: 9}


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("ipv4:10.0.0.1:5000", "ipv4:10.0.0.1:6000", True),
        ("ipv4:10.0.0.1:5000", "ipv4:10.0.0.2:5000", False),
        ("ipv6:%5B2001:db8::1%5D:5000", "ipv6:[2001:db8::ffff:1]:6000", True),
        ("ipv6:%5B2001:db8::1%5D:5000", "ipv6:%5B2001:db8:0:1::1%5D:5000", False),
        ("ipv6:%5B::ffff:10.0.0.1%5D:5000", "ipv6:%5B::ffff:10.0.0.2%5D:5000", False),
        ("ipv6:%5Bfe80::1%25eth0%5D:5000", "ipv6:%5Bfe80::2%25eth0%5D:5000", True),
        ("unix:/run/a", "unix:/run/a", True),
        ("", "", True),
    ],
)
def test_the_addresses_of_one_host_are_one(one: str, other: str, *, alike: bool) -> None:
    assert (address_of(one) == address_of(other)) is alike
