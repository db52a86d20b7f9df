"""Payloads that are encrypted by the client: in every form, and unreadable for the server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import slatemq
import slatemq.sync
from slatemq import Complete, EntryState, OutgoingMessage, Push, ReplaceDeadLetter, codecs
from slatemq._admin.entry_models import ViewName
from slatemq.encryption import KEY_HEADER, OVERHEAD_BYTES, KeyRing, new_key
from slatemq.errors import DataLoss, FailedPrecondition, InvalidArgument
from tests.acceptance.local_stack import LocalStack

pytestmark = pytest.mark.stack

OLD, NEW = new_key(), new_key()
WAIT_S = 60


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with LocalStack(tmp_path_factory.mktemp("stack"), ready=True) as running:
        yield running


@pytest.fixture
async def client(stack: LocalStack) -> AsyncIterator[slatemq.Client]:
    ring = KeyRing({"old": OLD}, "old")
    async with slatemq.connect(stack.endpoint, encryption=ring) as connected:
        yield connected


@pytest.fixture
async def plain(stack: LocalStack) -> AsyncIterator[slatemq.Client]:
    async with slatemq.connect(stack.endpoint) as connected:
        yield connected


async def claimed(client: slatemq.Client, queue_id: str, count: int) -> list[slatemq.Received]:
    found: list[slatemq.Received] = []
    while len(found) < count:
        found += await client.claim(queue_id, count, wait=WAIT_S)
    return found


def is_stored(stack: LocalStack, text: bytes) -> bool:
    """Whether a file of the store has these bytes."""
    for file in [one for one in (stack.folder / "data").rglob("*") if one.is_file()]:
        with suppress(FileNotFoundError):  # It has got its name, or was collected, since.
            if text in file.read_bytes():
                return True
    return False


async def test_what_is_published_comes_back_and_the_store_does_not_have_it(
    stack: LocalStack, client: slatemq.Client, plain: slatemq.Client
) -> None:
    await client.create_queue("forms")
    secrets = [os.urandom(48) for _ in range(6)]
    headers = {"queue": "forms"}
    visible = os.urandom(48)
    await plain.publish(visible, headers)
    await client.publish(secrets[0], headers)
    await client.publish_many([OutgoingMessage(one, headers) for one in secrets[1:3]])
    await client.publish_batch([OutgoingMessage(secrets[3], headers)], request_id="mine")
    await client.execute([Push("forms", secrets[4])])
    large = secrets[5] * 2000
    await client.publish(large, headers)
    await client.publish(b"", headers)

    got = await claimed(client, "forms", 8)

    expected = [visible, *secrets[:5], large, b""]
    assert sorted(one.payload for one in got) == sorted(expected)
    assert {one.headers.get(KEY_HEADER) for one in got} == {None, "old"}
    await plain.publish(visible, headers)  # Behind a commit that has all of them.
    assert is_stored(stack, visible)
    assert not any(is_stored(stack, secret) for secret in secrets)


async def test_a_repeated_request_is_the_same_to_the_server(client: slatemq.Client) -> None:
    await client.create_queue("repeated")
    batch = [OutgoingMessage(b"%d" % n, {"queue": "repeated"}) for n in range(3)]

    first = await client.publish_batch(batch, request_id="again", shard=0)
    second = await client.publish_batch(batch, request_id="again", shard=0)

    assert first == second
    with pytest.raises(InvalidArgument) as caught:
        await client.publish_batch(batch[:2], request_id="again", shard=0)
    assert caught.value.reason == "REQUEST_ID_REUSED"


async def test_keys_rotate_and_one_that_is_missing_costs_no_message(
    stack: LocalStack, client: slatemq.Client
) -> None:
    await client.create_queue("rotated", max_attempts=1)
    before = await client.publish(b"before", {"queue": "rotated"})
    both = KeyRing({"new": NEW, "old": OLD}, "new")
    async with slatemq.connect(stack.endpoint, encryption=both) as meanwhile:
        await meanwhile.publish(b"after", {"queue": "rotated"})

    async with slatemq.connect(stack.endpoint, encryption=KeyRing({"new": NEW}, "new")) as late:
        # A batch with one that cannot be read gives the others
        unread, read = sorted(await claimed(late, "rotated", 2), key=lambda one: one.message_id)
        async with read:
            assert read.payload == b"after"
        with pytest.raises(FailedPrecondition) as caught:
            async with unread:
                assert unread.payload
        assert (caught.value.reason, caught.value.subject) == ("KEY_UNKNOWN", "old")
        assert f"message {before}" in caught.value.message

    # And it waits as a dead letter for a client that has the key
    (entry,) = [one async for one in client.list_entries("rotated", EntryState.FAILED, view="full")]
    assert entry.message is not None
    assert entry.message.payload == b"before"


async def test_a_payload_that_was_changed_is_an_error(
    client: slatemq.Client, plain: slatemq.Client
) -> None:
    await client.create_queue("changed")
    sealed, headers = KeyRing({"old": OLD}, "old").seal(b"true", {"queue": "changed"})
    message_id = await plain.publish(sealed[:-1] + bytes([sealed[-1] ^ 1]), headers)

    (message,) = await claimed(client, "changed", 1)

    with pytest.raises(DataLoss, match=f"message {message_id}: ") as caught:
        assert message.payload
    assert caught.value.reason == "NOT_DECRYPTED"


async def test_a_payload_that_was_blanked_is_an_error_wherever_it_is_read(
    client: slatemq.Client, plain: slatemq.Client
) -> None:
    await client.create_queue("blanked")
    blank = await plain.publish(b"", {"queue": "blanked", KEY_HEADER: "old"})
    (message,) = await claimed(client, "blanked", 1)
    await message.release()

    def listed(view: ViewName) -> AsyncIterator[slatemq.Entry]:
        return client.list_entries("blanked", EntryState.AVAILABLE, view=view)

    (entry,) = [one async for one in listed("full")]
    shown = await client.get_entry(entry.handle)
    for read in (
        message,
        entry.message,
        shown.message,
        (await client.read_messages([blank]))[blank],
    ):
        assert read is not None
        with pytest.raises(DataLoss) as caught:
            assert read.payload
        assert caught.value.reason == "NOT_DECRYPTED"
    # Where no payload was asked for, none is missing
    (entry,) = [one async for one in listed("headers")]
    assert entry.message is not None
    assert entry.message.payload == b""


async def test_stored_messages_are_read_edited_and_replaced(
    client: slatemq.Client, plain: slatemq.Client
) -> None:
    await client.create_queue("stored", default_delay=900)
    published = await client.publish(b"first", {"queue": "stored", "a": "1"})
    handle = published.handle("stored")
    while not [one async for one in client.list_entries("stored", EntryState.DELAYED)]:
        await asyncio.sleep(0.02)

    await client.edit_message(handle, payload=b"second")
    assert (await client.read_messages([published]))[published].payload == b"second"
    # New headers leave the key as it is, whether their client knows of it or not
    await client.edit_message(handle, headers={"queue": "stored", "a": "1"})
    await plain.edit_message(handle, headers={"queue": "stored", "a": "2"})
    with pytest.raises(InvalidArgument, match="is encrypted"):
        await plain.edit_message(handle, payload=b"third")
    entry = await client.get_entry(handle)
    assert entry.message is not None
    assert (entry.message.payload, entry.message.headers["a"]) == (b"second", "2")
    raw = (await plain.read_messages([published]))[published]
    assert len(raw.payload) == len(b"second") + OVERHEAD_BYTES
    async with client.watch_delayed("stored") as watch:
        watched = await anext(watch)
    assert watched.message is not None
    assert watched.message.payload == b"second"


async def test_a_dead_letter_is_replaced_once_also_where_its_caller_repeats_it(
    client: slatemq.Client,
) -> None:
    await client.create_queue("replaced", max_attempts=1)
    await client.publish(b"first", {"queue": "replaced"})
    (message,) = await claimed(client, "replaced", 1)
    await message.fail("no")
    (letter,) = [one async for one in client.list_entries("replaced", EntryState.FAILED)]
    replacement = ReplaceDeadLetter(letter.handle, b"second", {"queue": "replaced"})

    for _ in range(2):
        await client.settle_dead_letters([replacement], request_id="replace")

    (again,) = await claimed(client, "replaced", 1)
    assert again.payload == b"second"
    for _ in range(2):
        await client.execute([Push("replaced", "third")], request_id="push")
    await client.execute([Complete(again)])
    (last,) = await claimed(client, "replaced", 1)
    assert last.payload == b"third"


async def test_views_of_a_queue_decode_what_was_decrypted(client: slatemq.Client) -> None:
    await client.create_queue("viewed")
    commands = client.queue_commands("viewed", codecs.TEXT)
    await client.execute([commands.push_item("item")])
    view = client.queue_view("viewed", codecs.TEXT)
    token = None
    while token is None:
        token = await view.try_next()
    async with view.refs.lease(token) as lease:
        assert lease.item == "item"


def test_the_blocking_client_encrypts_too(stack: LocalStack) -> None:
    ring = KeyRing({"old": OLD}, "old")
    with slatemq.sync.connect(stack.endpoint, encryption=ring) as client:
        client.create_queue("blocking")
        client.publish(b"text", {"queue": "blocking"})
        (message,) = client.claim("blocking", wait=WAIT_S)
        assert message.payload == b"text"


async def test_the_keys_may_come_from_the_file_of_a_profile(
    stack: LocalStack, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text(f"new {NEW}\nold {OLD}\n")
    profiles = tmp_path / "profiles.toml"
    profiles.write_text(f'[default]\nencryption_keys = "{keys}"\n')
    loaded = slatemq.Credentials.load(environ={"SLATEMQ_PROFILES": str(profiles)})
    async with slatemq.connect(stack.endpoint, credentials=loaded) as client:
        await client.create_queue("profiled")
        await client.publish(b"text", {"queue": "profiled"})
        (message,) = await claimed(client, "profiled", 1)

    assert (message.payload, message.headers[KEY_HEADER]) == (b"text", "new")
