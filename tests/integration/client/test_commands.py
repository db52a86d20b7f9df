"""Commands and tokens of the client: one execution, typed errors, retries that do nothing twice."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

import slatemq
import slatemq.sync
from slatemq import (
    CommandContext,
    Complete,
    Extend,
    Fail,
    MessageView,
    Push,
    Release,
    Transfer,
    codecs,
)
from slatemq.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    SlateMQError,
    Unavailable,
)
from slatemq.textqueue import TextQueue
from tests.integration.client.peers import Instance


@pytest.fixture
async def instance() -> AsyncIterator[Instance]:
    async with Instance() as running:
        running.broker.available.extend((b'{"n":%d}' % n, 0) for n in range(5))
        yield running


@pytest.fixture
async def client(instance: Instance) -> AsyncIterator[slatemq.Client]:
    async with slatemq.connect(instance.endpoint) as connected:
        yield connected


@pytest.fixture
def view(client: slatemq.Client) -> MessageView[Any]:
    return client.queue_view("q", codecs.JSON)


def reason(error: pytest.ExceptionInfo[SlateMQError]) -> str:
    return error.value.reason


async def test_commands_cross_the_wire_as_they_were_said(
    instance: Instance, client: slatemq.Client
) -> None:
    one, two, three, four, five = await client.claim("q", 5)

    await client.execute(
        [
            Complete(one),
            Fail(two.lease_token, "é" * 1000),
            Release(three, delay=1.5),
            Extend(four, 60),
            Transfer(five, "other", priority=0, delay=2),
            Push("mail", "hello", {"a": "b"}, retention=60, delay=0),
        ]
    )

    (request,) = instance.broker.executed
    said = request.commands
    assert said[0].complete.lease_token == one.lease_token
    assert said[1].fail.reason == "é" * 512
    assert said[2].release.delay_ms == 1500
    assert said[3].extend.lease_ms == 60_000
    assert said[4].transfer.HasField("priority")
    assert (said[4].transfer.target_queue_id, said[4].transfer.delay_ms) == ("other", 2000)
    assert said[5].push.payload == b"hello"
    assert said[5].push.HasField("delay_ms")
    assert not said[5].push.HasField("visible_at_ms")
    # What is finished is finished for the messages, too; an extension finishes nothing
    assert [m.finished for m in (one, three, four, five)] == [True, True, False, True]
    with pytest.raises(FailedPrecondition) as refused:
        await client.execute([Complete(one)])
    assert reason(refused) == "MESSAGE_FINISHED"


async def test_what_a_transfer_does_not_say_is_left_to_its_target(
    instance: Instance, client: slatemq.Client, view: MessageView[Any]
) -> None:
    (one,) = await client.claim("q")
    token = await view.try_next()
    assert token is not None
    released = client.queue_commands("q", codecs.JSON).complete([token])

    push = client.queue_commands("other", codecs.JSON).push(released)
    await client.execute([Transfer(one, "other"), push, Transfer(one.lease_token, "q", delay=0)])

    (request,) = instance.broker.executed
    transfers = [one.transfer for one in request.commands]
    assert [one.HasField("priority") for one in transfers] == [False] * 3
    assert [one.HasField("delay_ms") for one in transfers] == [False, False, True]


async def test_an_execution_whose_answers_get_lost_happens_once(
    instance: Instance, client: slatemq.Client
) -> None:
    (message,) = await client.claim("q")
    instance.broker.lose = 3
    await client.execute([Complete(message), Push("mail", b"x")])
    assert len(instance.broker.executed) == 1


async def test_what_was_refused_leaves_the_messages_as_they_were(
    instance: Instance, client: slatemq.Client
) -> None:
    (message,) = await client.claim("q")
    with pytest.raises(FailedPrecondition) as refused:
        await client.execute([Complete(message), Complete("0-00000000000000ff")])
    assert refused.value.metadata["command"] == "1"
    assert not message.finished
    await message.nack()


@pytest.mark.parametrize(
    ("commands", "field"),
    [
        ([], "commands"),
        ([Push("q", b"")] * 1001, "commands"),
        ([Complete("nonsense")], "commands[0].lease"),
        ([Complete("0-0"), Release("0-0", delay=-1)], "commands[1].delay"),
        ([Push("q", b"", retention=1.5)], "commands[0].retention"),
        ([Push("q", cast("Any", 7))], "commands[0].payload"),
        ([Transfer("0-0", "q", priority=cast("Any", "high"))], "commands[0].priority"),
    ],
)
async def test_bad_commands_are_named_and_not_sent(
    instance: Instance, client: slatemq.Client, commands: list[Any], field: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await client.execute(commands)
    assert refused.value.field == field
    assert instance.broker.executed == []


async def test_leases_of_two_shards_are_not_executed_together(client: slatemq.Client) -> None:
    with pytest.raises(FailedPrecondition) as refused:
        await client.execute([Complete("0-0"), Push("q", b""), Complete("1-0")])
    assert reason(refused) == "OTHER_SHARD"
    assert refused.value.metadata["command"] == "2"


async def test_failing_a_message_makes_it_a_dead_letter(
    instance: Instance, client: slatemq.Client
) -> None:
    (message,) = await client.claim("q")
    await message.fail("no address")
    (request,) = instance.broker.executed
    assert request.commands[0].fail.reason == "no address"
    assert message.finished


async def test_tokens_go_into_another_queue_together_with_others_commands(
    instance: Instance, client: slatemq.Client, view: MessageView[Any]
) -> None:
    # Given tokens of all items
    assert await view.len() == 5
    tokens: list[slatemq.MessageToken[Any]] = []
    while (token := await view.try_next()) is not None:
        async with view.refs.lease(token) as lease:
            assert lease.item == {"n": len(tokens)}
        tokens.append(token)
    assert len(tokens) == 5

    # When three of them are completed as one, and pushed with a new item and a push of others
    done = client.queue_commands("q", codecs.JSON).complete(tokens[:3])
    released = [done.released]
    assert instance.broker.executed == []
    blocks = client.queue_commands("blocks", codecs.JSON)
    context = CommandContext()
    blocks.push(done, priority=3).execute(context)
    blocks.push_item({"block": 1}).execute(context)
    context.add(Push("mail", b"ready"))
    assert [*released, done.released] == [True, False]
    assert instance.broker.executed == []
    await client.execute(context)

    # Then all of it is one execution
    (request,) = instance.broker.executed
    kinds = [command.WhichOneof("action") for command in request.commands]
    assert kinds == ["transfer"] * 3 + ["push"] * 2
    assert {command.transfer.target_queue_id for command in request.commands[:3]} == {"blocks"}
    assert request.commands[3].push.payload == b'{"block":1}'
    with pytest.raises(FailedPrecondition) as again:
        await client.execute(context)
    assert reason(again) == "CONTEXT_EXECUTED"


async def test_a_token_that_commits_alone_completes(
    instance: Instance, client: slatemq.Client, view: MessageView[Any]
) -> None:
    token = await view.try_next()
    assert token is not None
    done = client.queue_commands("q", codecs.JSON).complete([token])
    await done.commit()
    (request,) = instance.broker.executed
    assert [command.WhichOneof("action") for command in request.commands] == ["complete"]


async def test_every_second_use_is_a_typed_error(
    client: slatemq.Client, view: MessageView[Any]
) -> None:
    commands = client.queue_commands("q", codecs.JSON)
    token, other = await view.try_next(), await view.try_next()
    assert token is not None
    assert other is not None
    done = commands.complete([token])
    context = CommandContext()

    def used_twice() -> list[Any]:
        command = commands.push(done)
        command.execute(context)
        return [
            lambda: commands.complete([token]),
            lambda: commands.complete([other, other]),
            lambda: view.refs.lease(token),
            lambda: commands.push(done),
            lambda: command.execute(context),
            lambda: context.add(done),
        ]

    for use in used_twice():
        with pytest.raises(FailedPrecondition) as refused:
            use()
        assert reason(refused) == "TOKEN_USED"
    with pytest.raises(FailedPrecondition) as late:
        await done.commit()
    assert reason(late) == "TOKEN_USED"
    assert len(context) == 1
    # and what was refused used nothing up
    assert not other.finished


async def test_a_token_is_of_its_own_queue(client: slatemq.Client, view: MessageView[Any]) -> None:
    token = await view.try_next()
    assert token is not None
    with pytest.raises(InvalidArgument) as refused:
        client.queue_commands("other", codecs.JSON).complete([token])
    assert refused.value.field == "tokens[0]"


async def test_more_tokens_than_can_be_executed_together_are_refused_unused(
    client: slatemq.Client, view: MessageView[Any]
) -> None:
    token = await view.try_next()
    assert token is not None
    with pytest.raises(InvalidArgument, match="1 to 1,000, not 1,001") as refused:
        client.queue_commands("q", codecs.JSON).complete([token] * 1001)
    assert refused.value.field == "tokens"
    assert not token.finished


@pytest.mark.slow  # Leases that outlast a standstill of the machine.
async def test_a_token_whose_lease_ended_is_refused(
    instance: Instance, client: slatemq.Client, view: MessageView[Any]
) -> None:
    # Given a lease that ends at once, and one that its open lease on the item keeps
    instance.broker.lease_ms = 60
    token = await view.try_next()
    instance.broker.lease_ms = 3000
    kept = await view.try_next()
    assert token is not None
    assert kept is not None
    async with view.refs.lease(kept) as lease, asyncio.timeout(60):
        await instance.broker.until(lambda: kept.lease_token in instance.broker.extended)
        assert token.ended
        assert not lease.lost

        commands = client.queue_commands("q", codecs.JSON)
        for use in (lambda: commands.complete([token]), lambda: view.refs.lease(token)):
            with pytest.raises(FailedPrecondition) as refused:
                use()
            assert reason(refused) == "LEASE_ENDED"
        # What the client does not know, the broker does
        done = commands.complete([kept])
        instance.broker.leases.clear()
        with pytest.raises(FailedPrecondition) as raised:
            await done.commit()
        assert reason(raised) == "LEASE_ENDED"


async def first_item(view: slatemq.QueueView[Any]) -> Any:
    """A program that takes a view of any queue."""
    token = await view.try_next()
    assert token is not None
    async with view.refs.lease(token) as lease:
        return lease.item


async def test_a_program_that_takes_a_view_needs_no_server(
    view: MessageView[Any], tmp_path: Path
) -> None:
    in_memory = slatemq.RefSet[Any]()
    in_memory.add("a", {"n": 0})
    file = TextQueue(tmp_path / "items.tq")
    file.append('{"n": 0}')
    in_file = slatemq.RefSet[Any]()
    views = [
        view,
        slatemq.QueueView(slatemq.MemoryQueue(["a"]), in_memory),
        slatemq.QueueView(slatemq.TextQueueStore(file, in_file, codecs.JSON), in_file),
    ]
    for one in views:
        assert await first_item(one) == {"n": 0}


async def test_tokens_of_a_message_are_references_to_one_claim(
    client: slatemq.Client, view: MessageView[Any]
) -> None:
    token = await view.try_next()
    assert token is not None
    other = view.refs.upgrade(token.message_id)
    assert other is not None
    assert view.refs.references(token.message_id) == 2
    assert other.lease_token == token.lease_token
    client.queue_commands("q", codecs.JSON).complete([token])
    with pytest.raises(FailedPrecondition) as refused:
        view.refs.lease(other)
    assert reason(refused) == "TOKEN_USED"
    other.release()
    assert other.message_id not in view.refs


async def test_try_next_waits_for_a_dead_broker_no_longer_than_its_timeout(
    instance: Instance,
) -> None:
    await instance.servers[-1].stop(None)
    async with slatemq.connect(instance.endpoint, call_timeout=600) as client:
        view = client.queue_view("q", codecs.JSON, timeout=0.3)
        async with asyncio.timeout(60):
            with pytest.raises((Unavailable, DeadlineExceeded)):
                await view.try_next()


async def test_nothing_comes_from_a_paused_queue(
    instance: Instance, client: slatemq.Client, view: MessageView[Any]
) -> None:
    instance.broker.paused = True
    assert await view.try_next() is None
    with pytest.raises(FailedPrecondition) as refused:
        await client.claim("q")
    assert reason(refused) == "QUEUE_PAUSED"


async def test_a_consumer_waits_while_its_queue_is_paused(
    instance: Instance, client: slatemq.Client
) -> None:
    instance.broker.paused = True
    async with client.consume("q") as messages, asyncio.timeout(60):
        waiting = asyncio.create_task(anext(messages))
        while not messages.paused:
            await asyncio.sleep(0.01)
        assert messages.outage is None
        instance.broker.paused = False
        await waiting
        assert not messages.paused


async def test_a_consumer_of_batches_waits_while_its_queue_is_paused(
    instance: Instance, client: slatemq.Client
) -> None:
    instance.broker.paused = True
    async with client.consume_batches("q", 2) as batches, asyncio.timeout(60):
        waiting = asyncio.create_task(anext(batches))
        await instance.broker.until(lambda: instance.broker.refused_count)
        instance.broker.paused = False
        assert len(await waiting) == 2


def blocking(endpoint: str) -> None:
    with slatemq.sync.connect(endpoint) as client:
        view = client.queue_view("q", codecs.JSON)
        assert len(view) == 5
        assert view
        token = view.try_next()
        assert token is not None
        with view.refs.lease(token) as lease:
            assert lease.item == {"n": 0}
        done = client.queue_commands("q", codecs.JSON).complete([token])
        context = CommandContext()
        client.queue_commands("blocks", codecs.JSON).push(done).execute(context)
        client.execute(context)
        (message,) = client.claim("q")
        client.execute([Complete(message), Push("mail", b"x")])
        assert message.finished
        second = view.try_next()
        assert second is not None
        client.queue_commands("q", codecs.JSON).complete([second]).commit()


async def test_the_synchronous_face_has_it_all(instance: Instance) -> None:
    await asyncio.to_thread(blocking, instance.endpoint)
    items = [
        [command.WhichOneof("action") for command in request.commands]
        for request in instance.broker.executed
    ]
    assert items == [["transfer"], ["complete", "push"], ["complete"]]
