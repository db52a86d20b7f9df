"""Delays, keys, repair, commands and views from the client, against the real stack."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import slatemq
import slatemq.sync
from slatemq import Backoff, CommandContext, Complete, Entry, EntryState, Push, codecs
from slatemq.errors import Aborted, AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from tests.acceptance.local_stack import LocalStack

pytestmark = pytest.mark.stack
HOUR = 3600
LONG = 900


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with LocalStack(tmp_path_factory.mktemp("stack"), ready=True) as running:
        yield running


@pytest.fixture
async def client(stack: LocalStack) -> AsyncIterator[slatemq.Client]:
    async with slatemq.connect(stack.endpoint) as connected, asyncio.timeout(120):
        yield connected


async def listed(
    client: slatemq.Client, queue_id: str, state: EntryState, count: int, **options: Any
) -> list[Entry]:
    """The entries of a queue in a state, when there are this many."""
    while True:
        entries = [entry async for entry in client.list_entries(queue_id, state, **options)]
        if len(entries) == count:
            return entries
        await asyncio.sleep(0.02)


async def test_a_queue_keeps_all_its_settings(client: slatemq.Client) -> None:
    backoff = Backoff.exponential(1, max=600, jitter=0.5)
    made = await client.create_queue(
        "settings",
        default_delay=5,
        backoff=backoff,
        fallback_priority=7,
        max_total_lease=2 * 12 * HOUR,
        failed_retention=HOUR,
    )
    assert made.backoff == backoff
    assert made == await client.get_queue("settings")
    assert (made.default_delay_ms, made.fallback_priority) == (5000, 7)
    assert (made.max_total_lease_ms, made.failed_retention_s) == (24 * HOUR * 1000, HOUR)

    changed = await client.update_queue("settings", backoff=None, default_delay=0)
    assert (changed.backoff.multiplier, changed.default_delay_ms) == (5.0, 0)
    assert changed.fallback_priority == 7
    for backoff in (Backoff.fixed(2), Backoff.linear(0.5, max=60)):
        assert (await client.update_queue("settings", backoff=backoff)).backoff == backoff


async def test_queues_begin_with_one_another_and_in_the_past(client: slatemq.Client) -> None:
    await client.create_queue("first")
    await client.publish(b"old", {"topic": "past", "queue": "first"})
    await listed(client, "first", EntryState.AVAILABLE, 1)
    second = await client.create_queue(
        "second", with_queue="first", start_from="beginning", filter='headers["topic"] == "past"'
    )
    assert second.broker_shard == (await client.get_queue("first")).broker_shard
    (message,) = await client.claim("second", wait=60)
    assert message.payload == b"old"
    while True:
        replay = (await client.get_queue("second")).replay
        assert replay is not None
        if replay.done:
            break
        await asyncio.sleep(0.02)
    assert replay.fraction == 1.0
    with pytest.raises(NotFound):
        await client.create_queue("third", with_queue="nobody")
    with pytest.raises(InvalidArgument) as refused:
        await client.create_queue("third", start_from="yesterday")  # type: ignore[arg-type]
    assert refused.value.field == "start_from"


async def test_messages_wait_for_their_time(client: slatemq.Client) -> None:
    await client.create_queue("slow", default_delay=LONG)
    await client.publish(b"default", {"queue": "slow"})
    await client.publish(b"at once", {"queue": "slow"}, delay=0)
    later = await client.publish(b"later", {"queue": "slow"}, visible_at=32_503_680_000_000)

    (message,) = await client.claim("slow", 5, wait=60)
    assert message.payload == b"at once"
    await message.ack()
    default, at = await listed(client, "slow", EntryState.DELAYED, 2, view="full")
    assert default.message is not None
    assert default.message.payload == b"default"
    assert default.visible_at_ms == default.message.received_at_ms + LONG * 1000
    assert (at.message_id, at.visible_at_ms) == (later, 32_503_680_000_000)
    with pytest.raises(InvalidArgument):
        await client.publish(b"both", delay=1, visible_at=1)


async def test_a_key_is_stored_once(client: slatemq.Client) -> None:
    first = await client.publish(b"1", dedupe_key="order 1")
    second, other = await client.publish_many(
        [
            slatemq.OutgoingMessage(b"2", dedupe_key="order 1"),
            slatemq.OutgoingMessage(b"3", dedupe_key="order 3"),
        ]
    )
    assert (second, second.duplicate) == (first, True)
    assert not first.duplicate
    assert not other.duplicate


async def test_waiting_messages_are_found_moved_edited_and_cancelled(
    client: slatemq.Client,
) -> None:
    await client.create_queue("repair", default_delay=LONG)
    publish = await client.publish(b"old", {"queue": "repair", "n": "1"})
    (entry,) = await listed(client, "repair", EntryState.DELAYED, 1)
    assert entry.message is None

    # By the handle of the publish, of the listing, and by the ID alone
    assert (await client.get_entry(publish.handle("repair"))).message_id == publish
    found = [each async for each in client.find_message(publish)]
    assert [(each.queue_id, each.state) for each in found] == [("repair", EntryState.DELAYED)]

    full = await client.get_entry(entry.handle)
    etag = await client.edit_message(full.handle, payload="new", etag=full.etag)
    assert etag != full.etag
    with pytest.raises(Aborted):
        await client.edit_message(full.handle, payload="newer", etag=full.etag)
    now = await client.reschedule_entry(entry.handle)
    assert now.message_id == publish
    (message,) = await client.claim("repair", wait=60)
    assert (message.payload, dict(message.headers)) == (b"new", {"queue": "repair", "n": "1"})
    assert (await client.get_entry(message.handle)).state is EntryState.IN_FLIGHT
    await message.ack()

    other = await client.publish(b"gone", {"queue": "repair"})
    (entry,) = await listed(client, "repair", EntryState.DELAYED, 1)
    await client.cancel_entry(entry.handle)
    with pytest.raises(NotFound):
        await client.get_entry(other.handle("repair"))
    (done,) = await listed(client, "repair", EntryState.DONE, 1, newest_first=True)
    assert done.message_id == publish


async def test_an_observer_goes_on_where_it_stopped(client: slatemq.Client) -> None:
    await client.create_queue("observed", default_delay=LONG)
    seen = []
    async with client.watch_delayed("observed") as watch:
        for n in range(3):
            await client.publish(b"%d" % n, {"queue": "observed"})
            entry = await anext(watch)
            assert entry.message is not None
            seen.append(entry.message.payload)
        position = watch.position
    await client.publish(b"3", {"queue": "observed"})
    async with client.watch_delayed("observed", position=position) as watch:
        entry = await anext(watch)
    assert entry.message is not None
    assert [*seen, entry.message.payload] == [b"0", b"1", b"2", b"3"]


async def test_queues_are_paused_resumed_and_purged(client: slatemq.Client) -> None:
    await client.create_queue("halted", priority='int(headers["p"])')
    assert (await client.pause_queue("halted")).paused
    for n in (1, 1, 5):
        await client.publish(b"x", {"queue": "halted", "p": str(n)})
    with pytest.raises(FailedPrecondition) as refused:
        await client.claim("halted")
    assert refused.value.reason == "QUEUE_PAUSED"
    async with client.consume("halted", prefetch=1) as messages:
        waiting = asyncio.create_task(anext(messages))
        while not messages.paused:
            await asyncio.sleep(0.01)
        assert not (await client.resume_queue("halted")).paused
        await (await waiting).ack()
    await listed(client, "halted", EntryState.AVAILABLE, 2)
    counts = (await client.get_queue("halted")).counts
    assert {p: item.available_count for p, item in counts.by_priority.items()} == {1: 1, 5: 1}
    assert counts.oldest_claimable_age_ms is not None
    assert await client.purge_queue("halted") == 2
    assert await client.purge_queue("halted", ["done"]) == 1
    with pytest.raises(InvalidArgument) as unknown:
        await client.purge_queue("halted", ["lost"])  # type: ignore[list-item]
    assert unknown.value.field == "states"


async def test_items_move_through_queues_with_tokens(client: slatemq.Client) -> None:
    await client.create_queue("batches")
    await client.create_queue("blocks", with_queue="batches")
    await client.create_queue("mail", filter="false")
    for n in range(3):
        await client.publish(codecs.JSON.encode({"n": n}), {"queue": "batches"})
    view = client.queue_view("batches", codecs.JSON)
    while await view.len() < 3:
        await asyncio.sleep(0.02)

    # Given two tokens of verified items
    tokens = []
    for n in range(2):
        token = await view.try_next()
        assert token is not None
        async with view.refs.lease(token) as lease:
            assert lease.item == {"n": n}
        tokens.append(token)

    # When they are completed as one, pushed into another queue, and mail is sent with it
    done = client.queue_commands("batches", codecs.JSON).complete(tokens)
    context = CommandContext()
    client.queue_commands("blocks", codecs.JSON).push(done).execute(context)
    context.add(Push("mail", b"two batches"))
    await client.execute(context)

    # Then all of that is there, and the message of the mail reached that queue alone
    moved = await client.claim("blocks", 5, wait=60)
    assert [codecs.JSON.decode(message.payload) for message in moved] == [{"n": 0}, {"n": 1}]
    (mail,) = await client.claim("mail", wait=60)
    assert mail.payload == b"two batches"
    listed_done = await listed(client, "batches", EntryState.DONE, 2)
    assert {entry.transferred_to for entry in listed_done} == {"blocks"}
    assert await view.len() == 1
    await client.execute([Complete(message) for message in [*moved, mail]])
    with pytest.raises(FailedPrecondition) as refused:
        await client.execute([Complete(moved[0].lease_token)])
    assert refused.value.reason == "LEASE_ENDED"


async def test_a_message_given_up_is_a_dead_letter_with_its_history(
    client: slatemq.Client,
) -> None:
    await client.create_queue("given-up", max_attempts=5)
    await client.publish(b"x", {"queue": "given-up"})
    (message,) = await client.claim("given-up", wait=60)
    await message.nack("not yet", delay=0)
    (message,) = await client.claim("given-up", wait=60)
    assert message.attempts_count == 2
    await message.fail("no address")
    (entry,) = await listed(client, "given-up", EntryState.FAILED, 1, view="attempts")
    assert "no address" in entry.reason
    assert len(entry.attempts) == 2
    assert "not yet" in entry.attempts[0].outcome


async def test_dead_letters_go_into_another_queue_and_back(client: slatemq.Client) -> None:
    await client.create_queue("letters")
    await client.create_queue("elsewhere", filter="false", with_queue="letters")
    for n in range(4):
        await client.publish(b"%d" % n, {"queue": "letters", "n": str(n)})
    await listed(client, "letters", EntryState.AVAILABLE, 4)
    for message in await client.claim("letters", 4, wait=60):
        await message.fail("no address")
    begun = await client.start_redrive(
        "letters", into="elsewhere", filter='int(headers["n"]) < 3 && reason.contains("address")'
    )
    ended = await client.wait_redrive(begun.redrive_id, every=0.05)
    assert (ended.state, ended.redriven_count) == (slatemq.RedriveState.DONE, 3)
    moved = await client.claim("elsewhere", 5, wait=60)
    assert [(one.payload, one.attempts_count) for one in moved] == [(b"0", 1), (b"1", 1), (b"2", 1)]
    (left,) = await listed(client, "letters", EntryState.FAILED, 1)
    begun = await client.start_redrive("letters", message_ids=[left.message_id])
    assert (await client.wait_redrive(begun, every=0.05)).redriven_count == 1
    newest = [one async for one in client.list_redrives("letters")]
    assert newest[0].redrive_id == begun.redrive_id
    with pytest.raises(FailedPrecondition) as done:
        await client.cancel_redrive(begun)
    assert done.value.reason == "REDRIVE_DONE"


def blocking(endpoint: str) -> None:
    with slatemq.sync.connect(endpoint) as client:
        try:
            client.create_queue("blocking", default_delay=LONG)
        except AlreadyExists:
            pytest.fail("the queue is new")
        publish = client.publish("1", {"queue": "blocking"}, delay=LONG, dedupe_key="sync")
        with client.watch_delayed("blocking") as watch:
            entry = next(watch)
        assert entry.message_id == publish
        assert [each.message_id for each in client.find_message(publish)] == [publish]
        assert [each.handle for each in client.list_entries("blocking", "delayed")]
        client.reschedule_entry(entry.handle)
        (message,) = client.claim("blocking", wait=60)
        client.execute([Complete(message)])
        assert client.purge_queue("blocking", ["done"]) == 1


async def test_the_synchronous_face_does_the_same(stack: LocalStack) -> None:
    await asyncio.to_thread(blocking, stack.endpoint)
