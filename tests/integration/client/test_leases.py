"""Leases as the client sees them: extensions hold, and what is refused changes nothing."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

import slatemq
from slatemq import CommandContext, codecs
from slatemq._consume import delivered, gathering
from slatemq._consume.delivered import LeaseKeeper
from slatemq._rpc.queue_locations import REFUSED_S
from slatemq.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, Unavailable
from tests.integration.broker.rig import Rig, running
from tests.integration.client.peers import Broker, Instance, refuse
from tests.integration.waiting import eventually


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """A broker whose clock is months behind the client's, and stands still."""
    async with running() as started:
        await started.create()
        await started.assign([1, 2, 3])
        yield started


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[slatemq.Client]:
    async with slatemq.connect(rig.running.address, call_timeout=5) as connected:
        yield connected


def deadlines(rig: Rig) -> list[int]:
    now_ms = rig.clock.now_ms()
    return [lease.deadline_ms - now_ms for lease in rig.owner.shard.queues["q"].leases]


@pytest.mark.parametrize("is_open", [False, True])
async def test_an_extended_token_is_good_for_as_long_whatever_the_clocks_say(
    rig: Rig, client: slatemq.Client, is_open: bool
) -> None:
    view = client.queue_view("q", codecs.BYTES, lease=3)
    token = await view.try_next()
    assert token is not None
    if is_open:
        async with view.refs.lease(token):
            await view.refs.extend(token, 600)
            await asyncio.sleep(1.5)
    else:
        await view.refs.extend(token, 600)
    await asyncio.sleep(0.4)
    assert not token.ended
    assert deadlines(rig) == [600_000]
    await client.queue_commands("q", codecs.BYTES).complete([token]).commit()


async def test_an_extension_that_was_answered_is_not_taken_back_by_the_keeping(
    rig: Rig, client: slatemq.Client
) -> None:
    async with client.consume("q", prefetch=1, lease=3) as messages:
        message = await anext(messages)
        told_ms = await message.extend(600)
        await asyncio.sleep(1.5)
        assert told_ms - rig.clock.now_ms() == 600_000
        assert 600_000 in deadlines(rig)
        await message.ack()


async def test_a_lease_is_not_kept_while_its_owner_extends_it() -> None:
    # Given a message, and an extension of its lease that is not answered yet
    async with Instance() as instance:
        broker = instance.broker
        broker.lease_ms = 30_000
        broker.available.append((b"work", 0))
        broker.answers_extensions.clear()
        async with (
            slatemq.connect(instance.endpoint) as client,
            client.consume("q", lease=30) as messages,
        ):
            message = await anext(messages)
            extending = asyncio.create_task(message.extend(600))
            await broker.until(lambda: broker.extended)

            # When the time has come to extend it for the program
            messages._keeper._extend_due(time.monotonic() + 20)
            assert not messages._keeper._extensions

            # Then only its own extension is under way: the broker could take another one second
            assert len(broker.extended) == 1
            broker.answers_extensions.set()
            await extending
            await message.ack()


async def test_a_short_lease_is_kept_beside_long_ones() -> None:
    async with Instance() as instance, slatemq.connect(instance.endpoint) as client:
        # Given a keeper that has nothing to do for long
        broker = instance.broker
        broker.lease_ms = 60_000
        broker.available.append((b"long", 0))
        async with client.consume("q", prefetch=2) as messages:
            await anext(messages)
            await asyncio.sleep(0.05)

            # When a message comes whose lease ends before that
            broker.lease_ms = 3000
            broker.available.append((b"short", 0))
            await broker.report()
            await broker.until(lambda: broker.extended)

            # Then it is extended before the long one is due, after 20 s
            (short,) = [token for token, (name, _) in broker.leases.items() if name == b"short"]
            assert broker.extended == [short]


async def test_a_broker_that_does_not_answer_lets_no_lease_of_another_end() -> None:
    async with Instance() as instance, slatemq.connect(instance.endpoint) as client:
        # Given a long lease at one broker, and a short one at another
        kind: Any = Broker  # which does not serve everything
        silent, other = instance.broker, kind(shard=1)
        await instance.serve(broker=other, broker_shard=1)
        silent.lease_ms = 600_000
        silent.available.append((b"long", 0))
        async with client.consume("q", prefetch=2) as messages:
            message = await anext(messages)
            keeper = messages._keeper
            short = keeper.hold("1-0000000000000001", 3000, hold_s=600)

            # When the time has come for the long one, and its broker does not answer
            silent.answers_extensions.clear()
            keeper._held[message.lease_token]._next = 0.0
            await silent.until(lambda: silent.extended)

            # Then the short one is extended again and again, and its owner may extend it
            await other.until(lambda: len(other.extended) >= 3)
            async with asyncio.timeout(30), short.extending():
                assert not short.lost
            silent.answers_extensions.set()


async def test_a_lease_that_may_not_be_extended_is_asked_for_at_most_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a pause between two looks that is longer than this test
    monkeypatch.setattr(delivered, "LOOK_S_MIN", 600.0)
    async with Instance() as instance, slatemq.connect(instance.endpoint) as client:
        broker = instance.broker
        broker.may_not_extend = True
        async with client.consume("q") as messages:
            # When a lease is due whose extension is refused
            token, held_at_s = "0-0000000000000001", time.monotonic() - 60
            messages._keeper.hold(token, 3000, hold_s=600, now=held_at_s)
            await broker.until(lambda: broker.extended)

            # Then it is not asked for again, in the time of many calls
            for _ in range(20):
                await client.get_queue("q")
            assert broker.extended == [token]


async def test_what_is_refused_for_its_input_can_be_used_again(
    rig: Rig, client: slatemq.Client
) -> None:
    # A bad reason
    (message,) = await client.claim("q", lease=60)
    with pytest.raises(InvalidArgument) as refused:
        await message.fail(cast("Any", 5))
    assert refused.value.field == "reason"
    await message.fail("too bad")

    # A command beside one that is none
    view = client.queue_view("q", codecs.BYTES)
    token = await view.try_next()
    assert token is not None
    command = client.queue_commands("q", codecs.BYTES).push(
        client.queue_commands("q", codecs.BYTES).complete([token])
    )
    context = CommandContext()
    with pytest.raises(InvalidArgument) as wrong:
        context.add(command, cast("Any", "garbage"))
    assert wrong.value.field == "commands[1]"
    context.add(command)
    await client.execute(context)


async def test_a_batch_without_an_answer_is_acked_again(rig: Rig, client: slatemq.Client) -> None:
    async with client.consume_batches("q", 3, lease=60) as batches:
        batch = await anext(batches)
        rig.disk.free.clear()
        with pytest.raises((Unavailable, DeadlineExceeded)):
            await batch.ack_all()
        rig.disk.free.set()
        assert await batch.ack_all() == [None, None, None]
        assert await rig.counts() == {"done": 3}
        with pytest.raises(FailedPrecondition):
            await batch[0].ack()


async def test_an_ended_lease_is_refused_in_its_place() -> None:
    async with Instance() as instance, slatemq.connect(instance.endpoint) as client:
        instance.broker.available.extend((b"%d" % number, 0) for number in range(3))
        first, second, third = [one.lease_token for one in await client.claim("q", 3)]
        instance.broker.ended.add(second)
        ack = await client.ack([second, first, second, first, third])
        assert [getattr(one, "reason", None) for one in ack] == [
            "LEASE_ENDED",
            None,
            "LEASE_ENDED",
            None,
            None,
        ]
        assert instance.broker.acked == [b"0", b"2"]


async def test_leases_of_two_shards_are_finished_where_they_are() -> None:
    async with Instance() as instance, slatemq.connect(instance.endpoint) as client:
        kind: Any = Broker  # which does not serve everything
        other = kind(exists=False)
        await instance.serve(broker=other, broker_shard=1)
        tokens = ["0-a", "1-b", "0-c", "1-d"]
        for token in tokens:
            broker = other if token.startswith("1") else instance.broker
            broker.leases[token] = token.encode(), 1
        instance.broker.ended.add("0-c")
        ack = await client.ack(tokens)
        assert [getattr(one, "reason", None) for one in ack] == [None, None, "LEASE_ENDED", None]
        assert instance.broker.acked == [b"0-a"]
        assert other.acked == [b"1-b", b"1-d"]


async def test_a_claim_does_not_keep_messages_until_what_is_too_much_has_gone_back() -> None:
    # Given partitions on two brokers that both bring what one claim waits for, and answer no nack
    async with Instance() as instance:
        brokers = [instance.broker, Instance().broker]
        for shard, broker in enumerate(brokers):
            broker.shard, broker.partition_shards, broker.silent = shard, [0, 1], True
        await instance.serve(broker=brokers[1], broker_shard=1)
        async with (
            asyncio.timeout(60),
            slatemq.connect(instance.endpoint, call_timeout=120) as client,
        ):
            claiming = asyncio.create_task(client.claim("q", 1, wait=60))
            for broker in brokers:
                await broker.until(partial(getattr, broker, "streams"))
                broker.available.append((b"work", 0))
            for broker in brokers:
                await broker.report()

            # Then the claim returns one, and the other is on its way back
            [message] = await claiming
            [other] = [one for one in brokers if one.shard != int(message.lease_token[0])]
            await other.until(lambda: other.nacked)
            assert other.nacked == [(b"work", "", True)]


class SilentBroker(Broker):
    """Takes a claim, and never answers."""

    async def Claim(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.claims.append(request)
        await asyncio.Event().wait()


@pytest.mark.parametrize(("serving", "first"), [(0, 0), (11, 0), (3, 11)])
async def test_many_silent_partitions_delay_a_claim_no_more_than_one(
    serving: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given twelve partitions of which one answers, and a claim that begins with one of them
    shards = range(12)
    monkeypatch.setattr(gathering, "random", SimpleNamespace(randrange=lambda count: first))
    # On a busy machine one that answers takes its time, too.
    monkeypatch.setattr(gathering, "REFUSED_S", refused_s := 3 * REFUSED_S)
    make: Any = SilentBroker
    async with Instance() as instance:
        brokers: list[Broker] = [
            Instance().broker if shard == serving else make() for shard in shards
        ]
        for shard, broker in enumerate(brokers):
            broker.shard, broker.partition_shards = shard, list(shards)
            await instance.serve(broker=broker, broker_shard=shard)
        brokers[serving].available.append((b"work", 0))
        async with slatemq.connect(instance.endpoint) as client:
            began_s = time.monotonic()
            # When it claims more than there is
            [message] = await client.claim("q", 2)
            took_s = time.monotonic() - began_s
    # Then it has what there is, and has waited for one, or for one and then for all others at once
    assert message.payload == b"work"
    asked = sum(len(broker.claims) for broker in brokers)
    assert asked == (2 if serving == first else len(shards))
    assert took_s < 8 * refused_s  # one after the other: 11 of them


class Later:
    """A monotonic clock that a test moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_s = 0.0
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + self.by_s)
        monkeypatch.setattr(delivered, "time", clock)


async def test_no_message_is_handed_out_whose_lease_ended_while_nothing_was_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    later = Later(monkeypatch)
    async with Instance() as instance, slatemq.connect(instance.endpoint) as client:
        # Given a message in work, two that wait, and a broker that answers no extension
        broker = instance.broker
        broker.available.extend((b"%d" % number, 0) for number in range(3))
        async with client.consume("q") as messages:
            first = await anext(messages)
            await eventually(lambda: len(messages._buffer) == 2)
            was_lost = first.lost
            broker.answers_extensions.clear()

            # When their leases have ended, and another message comes
            later.by_s += 60
            broker.available.append((b"new", 0))
            await broker.report()

            # Then only that is handed out, and the program learns that the first one is lost
            assert (await anext(messages)).payload == b"new"
            assert [was_lost, first.lost] == [False, True]
            await broker.until(lambda: len(broker.nacked) == 2)
            assert {(payload, release) for payload, _, release in broker.nacked} == {
                (b"1", True),
                (b"2", True),
            }
            broker.answers_extensions.set()


async def test_no_batch_is_handed_out_whose_leases_ended_while_nothing_was_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    later = Later(monkeypatch)
    async with Instance() as instance, slatemq.connect(instance.endpoint) as client:
        broker = instance.broker
        broker.available.extend((b"%d" % number, 0) for number in range(4))
        async with client.consume_batches("q", 2) as batches:
            first = await anext(batches)
            await eventually(lambda: batches._ready)
            broker.answers_extensions.clear()
            later.by_s += 60
            taking = asyncio.create_task(anext(batches))
            await broker.until(lambda: len(broker.nacked) == 2)
            broker.available.append((b"new", 0))
            await broker.report()
            assert [message.payload for message in await taking] == [b"new"]
            assert all(message.lost for message in first)
            broker.answers_extensions.set()


async def test_a_message_that_was_finished_in_time_is_not_lost_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    later = Later(monkeypatch)
    async with Instance() as instance, slatemq.connect(instance.endpoint) as client:
        instance.broker.available.append((b"work", 0))
        async with client.consume("q") as messages:
            message = await anext(messages)
            await message.ack()
            later.by_s += 60
            assert not message.lost


FINISHING: dict[str, Any] = {
    "ack": slatemq.Received.ack,
    "nack": slatemq.Received.nack,
    "release": slatemq.Received.release,
    "fail": slatemq.Received.fail,
}


@pytest.mark.parametrize("name", FINISHING)
async def test_what_finishes_a_message_is_repeated_where_it_had_no_answer(name: str) -> None:
    async with (
        Instance() as instance,
        slatemq.connect(instance.endpoint, call_timeout=0.5) as client,
    ):
        # Given a broker that takes what finishes a message, and does not answer
        broker = instance.broker
        broker.lease_ms = 3000
        broker.available.append((b"work", 0))
        async with client.consume("q") as messages:
            message = await anext(messages)
            broker.silent = True
            with pytest.raises((Unavailable, DeadlineExceeded)):
                await FINISHING[name](message)

            # Then the message is not finished, and its lease is kept
            assert not message.finished
            del broker.extended[:]
            await broker.until(lambda: broker.extended)

            # And the repeat is answered
            broker.silent = False
            await FINISHING[name](message)
            with pytest.raises(FailedPrecondition):
                await FINISHING[name](message)


async def test_the_leases_of_a_batch_without_an_answer_are_kept() -> None:
    async with (
        Instance() as instance,
        slatemq.connect(instance.endpoint, call_timeout=0.5) as client,
    ):
        broker = instance.broker
        broker.lease_ms = 3000
        broker.available.append((b"work", 0))
        async with client.consume_batches("q", 2) as batches:
            batch = await anext(batches)
            broker.silent = True
            with pytest.raises((Unavailable, DeadlineExceeded)):
                await batch.ack_all()
            del broker.extended[:]
            await broker.until(lambda: broker.extended)
            broker.silent = False
            assert await batch.ack_all() == [None]


Fixture = tuple[Broker, slatemq.Client]


@pytest.fixture
async def short_call() -> AsyncIterator[Fixture]:
    """A broker with two messages of short leases, and a client that soon gives up a call."""
    async with (
        Instance() as instance,
        slatemq.connect(instance.endpoint, call_timeout=0.5) as client,
    ):
        instance.broker.lease_ms = 1000
        instance.broker.available.extend((b"%d" % number, 0) for number in range(2))
        yield instance.broker, client


async def is_kept(broker: Broker, keeper: LeaseKeeper, token: str) -> bool:
    """Whether a lease is still extended, beside one that is."""
    other = keeper.hold("0-00000000000000ff", 1000, hold_s=60)
    await broker.until(lambda: other.token in broker.extended)
    # What was under way has come by now.
    asked = len(broker.extended)
    await broker.until(lambda: broker.extended[asked:].count(other.token) >= 2)
    keeper.drop(other.token)
    return token in broker.extended[asked:]


async def test_a_lease_ends_whose_message_failed_without_an_answer(short_call: Fixture) -> None:
    # Given a handler that fails, and a broker that answers no nack
    broker, client = short_call
    broker.silent = True
    handled = list[slatemq.Received]()

    async def handle(message: slatemq.Received) -> None:
        handled.append(message)
        if len(handled) == 1:
            raise ValueError("boom")
        await asyncio.Event().wait()

    # When its next message is handled, so that the first one is done with
    working = asyncio.create_task(client.process("q", handle))
    await eventually(lambda: len(handled) == 2)
    # Then the lease of the first one is left to end
    assert not await is_kept(broker, client._keeper, handled[0].lease_token)
    working.cancel()
    broker.silent = False
    await asyncio.wait([working])


async def leave(batch: slatemq.Batch, problem: Exception | None) -> None:
    async with batch:
        if problem is not None:
            raise problem


@pytest.mark.parametrize("problem", [ValueError("boom"), None])
async def test_leases_end_of_a_batch_that_was_left_without_an_answer(
    short_call: Fixture, problem: ValueError | None
) -> None:
    broker, client = short_call
    async with client.consume_batches("q", 2) as batches:
        batch = await anext(batches)
        broker.silent = True
        with pytest.raises((ValueError, Unavailable, DeadlineExceeded)):
            await leave(batch, problem)
        assert not await is_kept(broker, client._keeper, batch[0].lease_token)
        broker.silent = False


class Unready(Broker):
    """Takes nothing that finishes a message while it is not ready."""

    is_ready = False

    async def Ack(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._check(context)
        return await super().Ack(request, context)

    async def Nack(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._check(context)
        return await super().Nack(request, context)

    async def _check(self, context: Any) -> None:
        if not self.is_ready:
            await refuse(context, Unavailable("not now", retry_after_ms=1))


@pytest.fixture
async def unready() -> AsyncIterator[tuple[Unready, slatemq.Client]]:
    make: Any = Unready
    broker = make(available=deque([(b"0", 0), (b"1", 0)]))
    async with (
        Instance(broker=broker) as instance,
        slatemq.connect(instance.endpoint, call_timeout=0.5) as client,
    ):
        yield broker, client


async def ack_in_vain(
    broker: Unready, block: slatemq.Received | slatemq.Batch, message: slatemq.Received
) -> None:
    """The broker is ready again only as the block is left."""
    async with block:
        try:
            await message.ack()
        finally:
            broker.is_ready = True


async def test_work_that_was_acked_in_vain_is_not_nacked_but_acked_again(
    unready: tuple[Unready, slatemq.Client],
) -> None:
    broker, client = unready
    async with client.consume("q") as messages:
        message = await anext(messages)
        with pytest.raises(Unavailable):
            await ack_in_vain(broker, message, message)
    assert message.finished
    assert broker.acked == [b"0"]
    assert broker.nacked == [(b"1", "", True)]  # by the end of the consumer


async def test_a_batch_acks_again_what_was_acked_in_vain_and_nacks_the_rest(
    unready: tuple[Unready, slatemq.Client],
) -> None:
    broker, client = unready
    async with client.consume_batches("q", 2) as batches:
        batch = await anext(batches)
        with pytest.raises(Unavailable):
            await ack_in_vain(broker, batch, batch[0])
    assert broker.acked == [b"0"]
    assert [(payload, release) for payload, _, release in broker.nacked] == [(b"1", False)]


@pytest.mark.parametrize("name", ["nack", "release", "fail"])
async def test_work_that_failed_is_not_acked_where_its_nack_had_no_answer(
    unready: tuple[Unready, slatemq.Client], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, client = unready
    monkeypatch.setattr(broker, "_answer", broker._check)  # of a fail
    async with client.consume("q", prefetch=1) as messages:
        message = await anext(messages)
        async with message:
            with pytest.raises(Unavailable):
                await FINISHING[name](message)
            broker.is_ready = True
    assert not broker.acked


async def test_a_batch_that_failed_is_not_acked_where_its_nack_had_no_answer(
    unready: tuple[Unready, slatemq.Client],
) -> None:
    broker, client = unready
    async with client.consume_batches("q", 2) as batches, await anext(batches) as batch:
        with pytest.raises(Unavailable):
            await batch.nack_all("broken")
        broker.is_ready = True
    assert not broker.acked


async def test_a_lease_is_kept_until_the_release_of_its_message_is_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    later = Later(monkeypatch)
    make: Any = Unready
    broker = make(available=deque([(b"0", 0), (b"1", 0)]))
    async with (
        Instance(broker=broker) as instance,
        slatemq.connect(instance.endpoint, call_timeout=0.5) as client,
        client.consume("q") as messages,
    ):
        # Given a message that waits, and whose lease ends while the broker answers nothing
        await anext(messages)
        await eventually(lambda: messages._buffer)
        broker.answers_extensions.clear()
        later.by_s += 60

        # When it is not yielded, and its release has no answer
        taking = asyncio.create_task(anext(messages))
        await eventually(lambda: "could not be acked or given back" in caplog.text)
        assert not broker.nacked

        # Then it is released once the broker answers again
        broker.is_ready = True
        broker.answers_extensions.set()
        await broker.until(lambda: broker.nacked)
        assert broker.nacked == [(b"1", "", True)]
        taking.cancel()
