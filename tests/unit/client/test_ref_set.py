"""Items that are referred to, and queues that need no server."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path

import pytest

from slatemq import MemoryQueue, QueueView, RefSet, RefToken, TextQueueStore, codecs
from slatemq.errors import AlreadyExists, FailedPrecondition, InvalidArgument
from slatemq.textqueue import Busy, ClaimLost, DoesNotFit, State, TextQueue, reserve
from slatemq.textqueue.locks import How, opened


def test_an_item_goes_with_its_last_reference() -> None:
    refs = RefSet[str]()
    refs.add(1, "one")
    # Before the first reference it stays
    assert (len(refs), refs.references(1), 1 in refs) == (1, 0, True)
    first, second = refs.upgrade(1), refs.upgrade(1)
    assert first is not None
    assert second is not None
    assert refs.references(1) == 2
    first.release()
    first.release()
    assert refs.references(1) == 1
    with refs.lease(second) as lease:
        assert lease.item == "one"
    # A token that is not held any more is released
    del second, lease
    assert (len(refs), refs.upgrade(1)) == (0, None)
    # And the ID is free again
    refs.add(1, "another")
    assert refs.references(1) == 0


def test_an_id_has_one_item() -> None:
    refs = RefSet[str]()
    refs.add("a", "one")
    with pytest.raises(AlreadyExists):
        refs.add("a", "two")


def test_a_token_is_good_for_one_use() -> None:
    refs = RefSet[str]()
    refs.add("a", "one")
    token = refs.upgrade("a")
    assert token is not None
    token.settled()
    assert token.finished
    with pytest.raises(FailedPrecondition) as raised:
        refs.lease(token)
    assert raised.value.reason == "TOKEN_USED"
    with pytest.raises(InvalidArgument, match="a RefToken, not str"):
        refs.lease("a")  # type: ignore[arg-type]


async def test_a_view_takes_the_items_of_a_queue_in_memory_in_order() -> None:
    refs, queue = RefSet[str](), MemoryQueue()
    for number, item in enumerate("abc"):
        refs.add(number, item)
        queue.push(number)
    view = QueueView(queue, refs)
    # One that is gone before its turn is passed over
    gone = refs.upgrade(1)
    assert gone is not None
    gone.release()

    taken = []
    assert await view.len() == 3
    while (token := await view.try_next()) is not None:
        with view.refs.lease(token) as lease:
            taken.append(lease.item)
    assert taken == ["a", "c"]
    assert await view.len() == 0


async def test_a_view_takes_the_texts_of_a_queue_file(tmp_path: Path) -> None:
    file = TextQueue(tmp_path / "jobs.tq")
    file.append_all(['{"n": 0}', '{"n": 1}', '{"n": 2}'])
    refs = RefSet[dict[str, int]]()
    store = TextQueueStore(file, refs, codecs.JSON, lease=timedelta(minutes=5))
    view = QueueView(store, refs)

    tokens: list[RefToken[dict[str, int]]] = []
    while (token := await view.try_next()) is not None:
        async with view.refs.lease(token) as lease:
            assert lease.item == {"n": len(tokens)}
        tokens.append(token)
    assert (len(tokens), await view.len()) == (3, 0)

    # Completed ones are marked, released ones come again, none twice
    await store.complete(tokens[:1])
    await store.release(tokens[1:2])
    assert await view.len() == 1
    assert [entry.text for entry in file.entries(State.PROCESSED)] == ['{"n": 0}']
    again = await view.try_next()
    assert again is not None
    assert refs.lease(again).item == {"n": 1}
    with pytest.raises(FailedPrecondition, match="used already"):
        await store.complete(tokens[:1])


@pytest.mark.parametrize("how", ["complete", "release"])
async def test_tokens_are_settled_beside_the_event_loop_while_their_file_is_locked(
    tmp_path: Path, how: str
) -> None:
    # Given two tokens of a queue file that another holds locked
    file = TextQueue(tmp_path / "jobs.tq")
    file.append_all(["x", "y"])
    refs = RefSet[str]()
    brief = TextQueueStore(file, refs, codecs.TEXT, timeout=timedelta(milliseconds=100))
    patient = TextQueueStore(file, refs, codecs.TEXT, timeout=timedelta(minutes=1))
    first = await QueueView(brief, refs).try_next()
    second = await QueueView(patient, refs).try_next()
    assert first is not None
    assert second is not None
    with opened(file.path, os.O_RDWR, How.EXCLUSIVE) as other:
        # When one is settled, then that is refused after the timeout
        with pytest.raises(Busy):
            await getattr(brief, how)([first])

        # And one that waits longer goes on when the lock is gone, which the loop alone can end
        waiting = asyncio.create_task(getattr(patient, how)([second]))
        await asyncio.sleep(0.03)
        assert not waiting.done()
        fcntl.flock(other, fcntl.LOCK_UN)
        await waiting

    # Then what was refused can be tried again
    await getattr(brief, how)([first])
    assert await brief.len() == (0 if how == "complete" else 2)


async def test_a_cancelled_look_at_a_file_claims_nothing(tmp_path: Path) -> None:
    # Given a view whose claim has begun
    begun, go_on = threading.Event(), threading.Event()

    def clock_ms() -> int:
        begun.set()
        go_on.wait(60)
        return time.time_ns() // 1_000_000

    path = tmp_path / "jobs.tq"
    TextQueue(path).append("x")
    refs = RefSet[str]()
    store = TextQueueStore(TextQueue(path, clock_ms=clock_ms), refs, codecs.TEXT)
    looking = asyncio.create_task(QueueView(store, refs).try_next())
    assert await asyncio.to_thread(begun.wait, 60)

    # When it is cancelled meanwhile
    looking.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await looking

    # Then the message is free
    assert (len(refs), await store.len()) == (0, 1)


@pytest.mark.parametrize("by", ["try_next", "len"])
async def test_a_view_does_not_hold_the_event_loop_while_its_file_is_locked(
    tmp_path: Path, by: str
) -> None:
    # Given a queue file that another holds locked, as `flock FILE` does
    file = TextQueue(tmp_path / "jobs.tq")
    file.append("x")
    refs = RefSet[str]()
    timeout = timedelta(milliseconds=100)
    brief = QueueView(TextQueueStore(file, refs, codecs.TEXT, timeout=timeout), refs)
    patient = QueueView(TextQueueStore(file, refs, codecs.TEXT, timeout=timedelta(minutes=1)), refs)
    with opened(file.path, os.O_RDWR, How.EXCLUSIVE) as other:
        # When a view wants it, then it is refused after its timeout
        with pytest.raises(Busy):
            await getattr(brief, by)()

        # And one that waits longer goes on when the lock is gone, which the loop alone can end
        waiting = asyncio.create_task(getattr(patient, by)())
        await asyncio.sleep(0.03)
        assert not waiting.done()
        fcntl.flock(other, fcntl.LOCK_UN)
        assert await waiting


async def test_an_item_that_cannot_be_decoded_is_failed_with_its_token(tmp_path: Path) -> None:
    # Given a text that its codec cannot decode, before one that it can
    file = TextQueue(tmp_path / "jobs.tq")
    file.append("not JSON", {"error": reserve(8)})
    file.append("5")
    refs = RefSet[int]()
    store = TextQueueStore(file, refs, codecs.JSON)
    view = QueueView(store, refs)

    # When both are taken
    broken, sound = await view.try_next(), await view.try_next()

    # Then the first raises when it is used, and can be failed, and the second is as ever
    assert broken is not None
    assert sound is not None
    with pytest.raises(ValueError, match="Expecting value"):
        _ = refs.lease(broken).item
    assert refs.lease(sound).item == 5
    with pytest.raises(DoesNotFit):
        await store.fail([broken], "E-NOT-JSON")
    await store.fail([broken], "E-JSON")
    assert broken.finished
    (failed,) = file.entries(State.ERROR)
    assert (failed.text, failed.get("error")) == ("not JSON", "E-JSON")


async def test_an_item_of_a_queue_file_is_the_same_object_each_time(tmp_path: Path) -> None:
    # Given a text that is decoded to an object that can be changed
    file = TextQueue(tmp_path / "jobs.tq")
    file.append('{"a": 1}')
    refs = RefSet[dict[str, int]]()
    token = await QueueView(TextQueueStore(file, refs, codecs.JSON), refs).try_next()
    assert token is not None

    # When it is changed, then each lease of it has the change
    async with refs.lease(token) as lease:
        lease.item["done"] = 1
        assert lease.item is lease.item
    assert refs.lease(token).item == {"a": 1, "done": 1}


@pytest.mark.parametrize("end", ["dropped", "refused"])
async def test_a_store_keeps_nothing_of_tokens_that_are_gone(tmp_path: Path, end: str) -> None:
    # Given a token of a long message
    file = TextQueue(tmp_path / "jobs.tq")
    file.append("x" * 100_000)
    refs = RefSet[str]()
    store = TextQueueStore(file, refs, codecs.TEXT)
    token = await QueueView(store, refs).try_next()
    assert token is not None
    claim = weakref.ref(token._slot)
    if end == "refused":
        file.claimed(str(token.item_id)).done()
        with pytest.raises(ClaimLost):
            await store.complete([token])

    # When it is gone, then so is all that was kept for it
    del token
    async with asyncio.timeout(120):
        while len(refs) or claim() is not None:
            # The loop, and the thread that it came from, have the error and its frames for a while.
            await asyncio.sleep(0.01)
            gc.collect()


async def test_a_claim_that_ended_is_refused_when_it_is_completed(tmp_path: Path) -> None:
    file = TextQueue(tmp_path / "jobs.tq")
    file.append("x")
    refs = RefSet[str]()
    store = TextQueueStore(file, refs, codecs.TEXT)
    token = await QueueView(store, refs).try_next()
    assert token is not None
    file.claimed(str(token.item_id)).release()
    with pytest.raises(ClaimLost):
        await store.complete([token])
    with pytest.raises(InvalidArgument, match="a RefToken"):
        await store.complete(["x"])  # type: ignore[list-item]
