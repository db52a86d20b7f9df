"""One principal's share of waiting claims, and of calls in flight: half."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Final

import grpc.aio
import pytest
import yaml
from google.rpc import error_details_pb2

from slatemq._rpc.rpc_status import STATUS_DETAILS_KEY, from_rpc_error
from slatemq.errors import ResourceExhausted
from tests.claimed_runs import messages_of
from tests.integration.broker.rpc.test_principal_limits import TOKENS, Limited, limited
from tests.integration.waiting import eventually

pytestmark = pytest.mark.usefixtures("cheap_hashes")

SAID: Final = {
    "waiting_claims_max": "'shop' has 3 claims and streams open",
    "concurrent_calls_max": "'shop' has 3 calls in flight",
}


async def beyond_share(call: Awaitable[Any], setting: str) -> None:
    """A call is refused: its principal has three of six places."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = from_rpc_error(caught.value)
    assert isinstance(error, ResourceExhausted)
    assert (error.reason, error.metadata) == ("PRINCIPAL_SHARE", {"limit": setting})
    assert error.message == (
        f"{SAID[setting]}, its share of {setting} (6): let some end first; retry in 1 s"
    )
    details = dict(caught.value.trailing_metadata() or ())[STATUS_DETAILS_KEY]
    assert error_details_pb2.RetryInfo.DESCRIPTOR.full_name.encode() in details
    assert error.retry_after_ms == 1_000


def held(made: Limited, setting: str) -> dict[str, int]:
    gate, delivery = made.rig.running.gate, made.rig.delivery
    shares = gate.calls if setting == "concurrent_calls_max" else delivery.places
    return dict(shares.held)


async def all_but(made: Limited, calls: list[Any], waiting_count: int) -> list[Any]:
    """The calls that wait once all others are refused."""
    await eventually(lambda: sum(call.done() for call in calls) == len(calls) - waiting_count)
    return [call for call in calls if not call.done()]


@pytest.mark.parametrize("setting", SAID)
async def test_one_that_claims_as_often_as_it_can_leaves_half_to_others(
    tmp_path: Path, setting: str
) -> None:
    async with limited(tmp_path, settings={setting: 6}) as made:
        await made.ops.create("q")
        calls = [made.shop.claim() for _ in range(10)]
        waiting = await all_but(made, calls, 3)
        for call in calls:
            if call.done():
                await beyond_share(call, setting)
        assert made.callers.usage.refused == {(setting, "shop"): 7}
        assert held(made, setting) == {"shop": 3}

        # Another one is served, by streams and claims
        stream = await made.ops.open(credit=1)
        other = made.ops.claim()
        await eventually(lambda: held(made, setting) == {"shop": 3, "ops": 2})
        await made.rig.assign([1, 2, 3, 4, 5])
        assert len(messages_of(await other)) == 1
        assert len(messages_of(await stream.read())) == 1
        for call in waiting:
            assert len(messages_of(await call)) == 1

        # and so is the one, once its own have ended
        await eventually(lambda: held(made, setting) == {"ops": 1})
        streams = [await made.shop.open() for _ in range(3)]
        await beyond_share(made.shop.open(), setting)
        await beyond_share(made.shop.claim(), setting)
        streams[0].cancel()
        await eventually(lambda: held(made, setting) == {"shop": 2, "ops": 1})
        await made.shop.claim(wait_ms=0)
        # also as an error ends them
        await made.ops.delete("q")
        await eventually(lambda: held(made, setting) == {})


async def test_what_one_waits_for_leaves_it_the_calls_that_end_that(tmp_path: Path) -> None:
    bounds = {"waiting_claims_max": 6, "concurrent_calls_max": 9}
    async with limited(tmp_path, settings=bounds) as made:
        await made.ops.create("q")
        waiting = await all_but(made, [made.shop.claim() for _ in range(5)], 3)

        await made.shop.get("q")

        for call in waiting:
            call.cancel()


async def test_one_that_watches_queues_as_often_as_it_can_leaves_half_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.broker.rpc.queues.WATCHERS_MAX", 6)
    async with limited(tmp_path) as made:
        watches = [made.shop.watch() for _ in range(3)]
        for watch in watches:
            await watch.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await made.shop.watch().read()
        error = from_rpc_error(caught.value)
        assert (error.reason, error.metadata) == ("PRINCIPAL_SHARE", {"limit": "queue_watches"})

        other = made.ops.watch()
        await other.read()
        for watch in (*watches, other):
            watch.cancel()


async def test_services_have_no_share(tmp_path: Path) -> None:
    async with limited(tmp_path, settings={"waiting_claims_max": 6}) as made:
        await made.ops.create("q")
        claims = [asyncio.create_task(made.rig.claim(wait_ms=60_000)) for _ in range(6)]
        await eventually(lambda: made.rig.delivery.places.count == 6)
        assert held(made, "waiting_claims_max") == {}

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await made.shop.claim()
        assert from_rpc_error(caught.value).reason == "TOO_MANY_WAITING_CLAIMS"
        assert made.callers.usage.refused == {}
        for claim in claims:
            claim.cancel()
        await asyncio.wait(claims)


async def test_a_stream_gives_back_the_place_of_the_principal_that_opened_it(
    tmp_path: Path,
) -> None:
    async with limited(tmp_path) as made:
        await made.ops.create("q")
        stream = await made.shop.open(credit=10)
        assert held(made, "waiting_claims_max") == {"shop": 1}

        # Given that its token is another principal's now, with other limits
        entry = {**TOKENS("shop").entry, "principal": "ops"}
        (tmp_path / "tokens.yaml").write_text(yaml.safe_dump({"tokens": [entry]}))
        authenticator = made.callers._authenticator
        assert authenticator._tokens is not None
        assert authenticator._tokens.reload()
        authenticator.forget()
        made.change(open_streams=1)
        await made.rig.assign([1])
        assert len(messages_of(await stream.read())) == 1
        other = await made.shop.open()
        for setting in SAID:
            assert held(made, setting) == {"shop": 1, "ops": 1}

        for call in (stream, other):
            call.cancel()
        await eventually(lambda: not any(held(made, setting) for setting in SAID))
