"""An ingest that is down behind a broker that is up: consumers of its messages say so."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

import slatemq
from libs.storage.layout.ids import MAX_SHARD, message_id
from services.broker.delivery.message_cache import IngestMessages
from services.broker.requests.limits import KNOWN_AWAITED_MAX
from slatemq._consume import batches
from slatemq._rpc import outages
from slatemq.errors import Unavailable
from slatemq.v1 import consumer_pb2
from tests.claimed_runs import messages_of
from tests.integration.broker import rig as broker_rig
from tests.integration.broker.delivery.test_waiting_claims import assign
from tests.integration.broker.rig import Rig, refusal, running
from tests.integration.client.outage_lines import Lines, lines
from tests.integration.client.peers import Instance
from tests.integration.stack import processes as process_stack
from tests.integration.waiting import eventually

__all__ = ["lines"]

FIRST, SECOND = message_id(0, 1), message_id(1, 1)


class Ingests(broker_rig.Ingest):
    """Some of them are down."""

    def __init__(self) -> None:
        super().__init__()
        self.down_shards: set[int] = set()

    async def check(self, shard: int) -> None:
        if shard in self.down_shards:
            raise Unavailable("it is down")

    async def fetch(self, shard: int, ids: Sequence[int], max_bytes: int) -> IngestMessages:
        await self.check(shard)
        return await super().fetch(shard, ids, max_bytes)


def ids(answer: consumer_pb2.ClaimResponse | consumer_pb2.ConsumeResponse) -> list[int]:
    return [claimed.message.message_id for claimed in messages_of(answer)]


def claim(rig: Rig, wait_ms: int) -> asyncio.Future[consumer_pb2.ClaimResponse]:
    request = consumer_pb2.ClaimRequest(queue_id="q", max_messages=10, wait_ms=wait_ms)
    return asyncio.ensure_future(rig.consumers.Claim(request))


async def test_a_stream_says_which_ingests_its_messages_wait_for_and_when_that_changes() -> None:
    # Given messages of two ingests, of which one is down, and a stream
    ingests = Ingests()
    ingests.down_shards = {1}
    async with running(ingest=ingests) as rig, asyncio.timeout(60):
        await rig.create()
        await assign(rig, "q", 1, SECOND)
        call: Any = rig.consumers.Consume()
        credit = consumer_pb2.ConsumeCredit(messages_count=10)
        start = consumer_pb2.ConsumeStart(queue_id="q", credit=credit)
        await call.write(consumer_pb2.ConsumeRequest(start=start))
        assert not (await call.read()).awaited_ingest_shards

        # Then it is said at once, without a message
        answer = await call.read()
        assert (ids(answer), list(answer.awaited_ingest_shards)) == ([], [1])

        # And beside each message of the other that passes
        await rig.assign([FIRST])
        answer = await call.read()
        assert (ids(answer), list(answer.awaited_ingest_shards)) == ([FIRST], [1])

        # And that it is over when the ingest is back
        ingests.down_shards.clear()
        answer = await call.read()
        if not answer.runs:
            assert not answer.awaited_ingest_shards
            answer = await call.read()
        assert (ids(answer), list(answer.awaited_ingest_shards)) == ([SECOND], [])
        call.cancel()


async def test_a_claim_with_messages_says_which_ingests_others_wait_for() -> None:
    ingests = Ingests()
    ingests.down_shards = {1}
    async with running(ingest=ingests) as rig, asyncio.timeout(60):
        await rig.create()
        await assign(rig, "q", 1, SECOND)
        await rig.assign([FIRST])
        answer = await claim(rig, wait_ms=30_000)
        assert (ids(answer), list(answer.awaited_ingest_shards)) == ([FIRST], [1])
        ingests.down_shards.clear()
        answer = await claim(rig, wait_ms=30_000)
        assert (ids(answer), list(answer.awaited_ingest_shards)) == ([SECOND], [])


async def test_a_claim_that_waits_says_at_once_that_other_ingests_are_awaited_than_it_knows() -> (
    None
):
    ingests = Ingests()
    async with running(ingest=ingests) as rig, asyncio.timeout(60):
        await rig.create()

        def claim_knowing(*shards: int) -> asyncio.Future[consumer_pb2.ClaimResponse]:
            known = consumer_pb2.IngestShards(shards=shards)
            request = consumer_pb2.ClaimRequest(
                queue_id="q", max_messages=10, wait_ms=60_000, known_awaited=known
            )
            return asyncio.ensure_future(rig.consumers.Claim(request))

        # Given a claim that waits, when a message comes whose ingest is down
        waiting = claim_knowing()
        ingests.down_shards = {1}
        await assign(rig, "q", 1, SECOND)
        answer = await waiting
        assert (ids(answer), list(answer.awaited_ingest_shards)) == ([], [1])

        # Then one that knows of it waits for messages
        waiting = claim_knowing(1)
        await rig.assign([FIRST])
        answer = await waiting
        assert (ids(answer), list(answer.awaited_ingest_shards)) == ([FIRST], [1])

        # And hears of its end, with what came of it or before that
        waiting = claim_knowing(1)
        ingests.down_shards.clear()
        answer = await waiting
        assert not answer.awaited_ingest_shards
        if not answer.runs:
            answer = await claim_knowing()
        assert ids(answer) == [SECOND]


@pytest.mark.parametrize(
    ("shards", "field"),
    [
        (range(KNOWN_AWAITED_MAX + 1), "known_awaited.shards"),
        ([7] * (KNOWN_AWAITED_MAX + 1), "known_awaited.shards"),
        ([0, -1], "known_awaited.shards[1]"),
        ([MAX_SHARD + 1], "known_awaited.shards[0]"),
    ],
)
async def test_a_claim_knows_a_bounded_number_of_ingests(shards: Sequence[int], field: str) -> None:
    async with running() as rig, asyncio.timeout(60):
        await rig.create()
        known = consumer_pb2.IngestShards(shards=shards)
        request = consumer_pb2.ClaimRequest(queue_id="q", known_awaited=known)
        code, reason, refused_field = await refusal(rig.consumers.Claim(request))
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "OUT_OF_RANGE")
        assert refused_field == field


async def test_a_waiting_claim_holds_two_bytes_of_each_ingest_that_it_knows() -> None:
    async with running() as rig, asyncio.timeout(60):
        await rig.create(max_in_flight=1)  # where it is full, no look finds that others are awaited
        await rig.assign([FIRST])
        await rig.claim()
        shards = range(MAX_SHARD, MAX_SHARD - KNOWN_AWAITED_MAX, -1)
        known = consumer_pb2.IngestShards(shards=shards)
        request = consumer_pb2.ClaimRequest(queue_id="q", wait_ms=30_000, known_awaited=known)
        waiting = asyncio.ensure_future(rig.consumers.Claim(request))
        delivery = rig.delivery
        assert delivery is not None
        await eventually(lambda: delivery.has_waiters("q"))
        [waiter] = [
            one for waiter_line in delivery._waiter_lines.values() for one in waiter_line.line
        ]
        assert list(waiter.awaited_shards) == sorted(shards)
        assert sys.getsizeof(waiter.awaited_shards) < 2 * KNOWN_AWAITED_MAX + 200
        waiting.cancel()


async def test_a_full_queue_does_not_pretend_that_the_ingest_is_back() -> None:
    # Given a queue that may have one message in flight, and has it
    ingests = Ingests()
    ingests.down_shards = {1}
    async with running(ingest=ingests) as rig, asyncio.timeout(60):
        await rig.create(max_in_flight=1)
        await assign(rig, "q", 1, SECOND)
        await rig.assign([FIRST])
        call: Any = rig.consumers.Consume()
        credit = consumer_pb2.ConsumeCredit(messages_count=10)
        start = consumer_pb2.ConsumeStart(queue_id="q", credit=credit)
        await call.write(consumer_pb2.ConsumeRequest(start=start))
        await call.read()
        answer = await call.read()
        while not answer.runs:
            answer = await call.read()
        (token,) = [one.lease_token for one in messages_of(answer)]
        reading = asyncio.ensure_future(call.read())
        delivery = rig.delivery
        assert delivery is not None
        await eventually(
            lambda: any(waiter_line.line for waiter_line in delivery._waiter_lines.values())
        )
        (stream,) = delivery.streams

        # When the queue is looked at for a claim
        assert not (await claim(rig, wait_ms=0)).runs

        # Then nothing changes until it has room again
        assert (list(stream.awaited_shards), reading.done()) == ([1], False)
        ingests.down_shards.clear()
        await rig.ack(token)
        answer = await reading
        if not answer.runs:
            answer = await call.read()
        assert (ids(answer), list(answer.awaited_ingest_shards)) == ([SECOND], [])
        call.cancel()


# --- The client ---------------------------------------------------------------


@pytest.mark.parametrize("kind", ["consume", "consume_batches"])
async def test_messages_that_wait_for_an_ingest_are_logged_though_others_come(
    instance: Instance, lines: Lines, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outages, "WARN_S", 600.0)
    async with (
        slatemq.connect(instance.endpoint) as client,
        getattr(client, kind)("q", outage_timeout=60) as consumer,
    ):
        # Given messages that come while others wait
        instance.broker.available.append((b"before", 0))
        await anext(consumer)
        monkeypatch.setattr(outages, "WARN_S", 0.2)
        instance.broker.awaited = [3]
        instance.broker.available.append((b"0", 0))
        await instance.broker.report()
        await anext(consumer)
        line = await lines.first("not answered")
        assert line.startswith("an ingest that messages of queue 'q' wait for has not answered")
        assert line.endswith("ingest 3 is down, or still reading payloads")
        # When it is back, that is said with the next answer
        instance.broker.awaited = []
        instance.broker.available.append((b"1", 0))
        await instance.broker.report()
        await anext(consumer)
        await lines.first("an ingest that messages of queue 'q' wait for answers again")
    assert len(lines.lines) == 2


async def test_the_timeout_counts_from_the_last_message_that_came(
    instance: Instance, lines: Lines
) -> None:
    async with (
        slatemq.connect(instance.endpoint) as client,
        client.consume("q", outage_timeout=600) as messages,
        asyncio.timeout(60),
    ):
        instance.broker.available.append((b"before", 0))
        await anext(messages)
        messages._parts[0].ingests._timeout_s = 2
        # Given messages in the buffer for longer than the timeout
        instance.broker.awaited = [3]
        instance.broker.available.extend([(b"0", 0), (b"1", 0)])
        await instance.broker.report()
        await anext(messages)
        await asyncio.sleep(2.5)
        assert (await anext(messages)).payload == b"1"
        # When nothing more comes
        with pytest.raises(Unavailable, match="ingest 3 is down") as raised:
            await anext(messages)
    assert raised.value.reason == "OUTAGE_TIMEOUT"


@pytest.mark.parametrize("wait", [0, 0.05])
async def test_one_claim_ends_with_its_wait_where_the_ingest_is_down(
    instance: Instance, wait: float
) -> None:
    instance.broker.is_ingest_down = True
    async with slatemq.connect(instance.endpoint) as client:
        with pytest.raises(Unavailable, match="ingest 3 is down") as raised:
            await client.claim("q", wait=wait)

    assert raised.value.reason == "INGEST_DOWN"
    assert len(instance.broker.claims) == 1


async def test_a_program_leaves_out_what_is_too_much_to_know(instance: Instance) -> None:
    async with (
        slatemq.connect(instance.endpoint) as client,
        client.consume_batches("q", 1) as claiming,
        asyncio.timeout(60),
    ):
        claims = instance.broker.claims
        for awaited in (range(KNOWN_AWAITED_MAX), range(KNOWN_AWAITED_MAX + 1), [3], []):
            # When an answer names this many ingests
            instance.broker.awaited = [*awaited]
            instance.broker.available.append((b"0", 0))
            await instance.broker.report()
            await anext(claiming)

            # Then the next claim knows them, or does not care
            fits = len(awaited) <= KNOWN_AWAITED_MAX
            await eventually(partial(knows, claims, fits, [*awaited] * fits))


def knows(claims: list[consumer_pb2.ClaimRequest], says_so: bool, shards: list[int]) -> bool:
    known = claims[-1].known_awaited
    return (claims[-1].HasField("known_awaited"), list(known.shards)) == (says_so, shards)


# --- Real processes -----------------------------------------------------------


async def test_consumers_of_a_real_stack_say_that_messages_wait_for_an_ingest_that_is_down(
    tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outages, "WARN_S", 0.2)
    async with process_stack.running(tmp_path) as stack:
        # Given messages in a queue, whose ingest is down while its broker is up
        await stack.create_queue("q", "true")
        await stack.publish("a", "b")
        await stack.routed()
        await stack.ingest.kill()

        # When the command consumes, it says what is down, and ends as with a broker that is down
        command = ("-m", "slatemq.cli", "consume", "q", "--timeout", "10s")
        consuming = await asyncio.create_subprocess_exec(
            *(sys.executable, *command, "--endpoint", stack.broker.address),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await consuming.communicate()
        warned, ended = err.decode().splitlines()[:2]
        assert (consuming.returncode, out) == (3, b"")
        what = "an ingest that messages of queue 'q' wait for has not answered for"
        away = "ingest 0 is down, or still reading payloads"
        assert re.fullmatch(f"slatemq: {what} \\d+ s: {away}", warned)
        assert re.fullmatch(f"slatemq: {what} \\d+ s: {away}", ended)

        # And a program that claims batches hears of it long before its claim ends
        monkeypatch.setattr(batches, "BATCH_WAIT_S", 60.0)
        async with (
            slatemq.connect(stack.broker.address) as client,
            client.consume_batches("q") as claiming,
        ):
            waiting = asyncio.create_task(anext(claiming))
            await lines.first(what)
            waiting.cancel()
            await asyncio.wait([waiting])
        lines.lines.clear()

        # And a program that processes hears of it in its log
        got: list[int] = []
        done = asyncio.Event()

        async def handle(message: slatemq.Received) -> None:
            got.append(message.attempts_count)
            if len(got) == 2:
                done.set()

        async with slatemq.connect(stack.broker.address) as client:
            working = asyncio.create_task(client.process("q", handle))
            await lines.first(what)
            assert not got
            # And when it is back, with the first attempt of each
            await stack.ingest.start()
            await done.wait()
            await lines.first("an ingest that messages of queue 'q' wait for answers again")
            working.cancel()
            await asyncio.wait([working])
        assert got == [1, 1]
