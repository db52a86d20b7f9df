"""The parts of the examples with events: a cache, an audit log and an inbox."""

import asyncio
import os
from contextlib import closing
from pathlib import Path

import pytest
from aiohttp import web

from examples.events.audit_log import DAYS_OPEN, AuditLog
from examples.events.cached_files import Cache, changed_key
from examples.events.signatures import ID, SIGNATURE, TIMESTAMP, make_secret, sign
from examples.events.webhook_receiver import Inbox, make_app
from slatemq.events import Event, decode_event, encode_event, make_event
from slatemq.events.catalogue import EventData, MessagePublished

DAY_MS = 86_400_000
NOON_MS = 1_771_761_600_000


def event(number: int, at_ms: int = NOON_MS, data: EventData | None = None) -> Event:
    data = data or MessagePublished(message_id=number, headers={"changed": "a"}, size=1)
    return make_event(data, source="ingest-0", request_id="", at_ms=at_ms)


def lines(file: Path) -> list[Event]:
    return [decode_event(line) for line in file.read_bytes().splitlines()]


# --- Cache --------------------------------------------------------------------------------------


async def test_a_value_is_loaded_once_until_it_is_dropped_or_too_old() -> None:
    loads: list[str] = []

    async def load(key: str) -> bytes:
        loads.append(key)
        return b"%d" % len(loads)

    cache = Cache(load, 60)
    assert [await cache.get("a"), await cache.get("a")] == [(b"1", False), (b"1", True)]
    cache.drop("a")
    assert await cache.get("a") == (b"2", False)
    cache.clear()
    assert await cache.get("a") == (b"3", False)
    old = Cache(load, 0)
    assert [await old.get("a"), await old.get("a")] == [(b"4", False), (b"5", False)]


async def test_a_value_that_changes_while_it_is_loaded_is_not_kept() -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def load(key: str) -> bytes:
        started.set()
        await go_on.wait()
        return b"old"

    cache = Cache(load, 60)
    loading = asyncio.create_task(cache.get("a"))
    await started.wait()
    cache.drop("a")
    go_on.set()

    assert await loading == (b"old", False)
    assert await cache.get("a") == (b"old", False)
    assert await cache.get("a") == (b"old", True)


async def test_a_load_that_fails_leaves_nothing() -> None:
    async def load(key: str) -> bytes:
        raise FileNotFoundError(key)

    cache = Cache(load, 60)
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            await cache.get("a")


async def test_an_event_without_its_headers_clears_the_cache() -> None:
    loads: list[str] = []

    async def load(key: str) -> bytes:
        loads.append(key)
        return b""

    cache = Cache(load, 60)
    await cache.get("a")
    await cache.get("b")
    omitted = MessagePublished(message_id=1, headers={}, size=0, headers_omitted=True)
    cache.drop(changed_key(event(1, data=omitted)))
    await cache.get("a")
    await cache.get("b")
    assert loads == ["a", "b", "a", "b"]


async def test_an_event_that_names_nothing_leaves_the_cache_as_it_is() -> None:
    async def load(key: str) -> bytes:
        return b""

    cache = Cache(load, 60)
    await cache.get("a")
    cache.drop(changed_key(event(1, data=MessagePublished(message_id=1, headers={}, size=0))))
    assert await cache.get("a") == (b"", True)


def test_events_name_what_changed() -> None:
    assert changed_key(event(1)) == "a"
    assert changed_key(event(1, data=MessagePublished(message_id=1, headers={}, size=0))) == ""
    notified = {"type": "object.deleted", "bucket": "b", "key": "x.json"}
    assert changed_key(event(1, data=MessagePublished(message_id=1, headers=notified, size=0))) == (
        "x.json"
    )


# --- Audit log ----------------------------------------------------------------------------------


def test_an_event_is_in_the_file_of_its_day_once_however_often_it_comes(tmp_path: Path) -> None:
    given = [event(number, NOON_MS + number % 2 * DAY_MS) for number in range(10)]

    with AuditLog(tmp_path) as log:
        assert log.append([*given[:6], given[0]]) == 6
        assert log.append(given) == 4

    with AuditLog(tmp_path) as log:
        assert log.append(given) == 0
    assert lines(tmp_path / "2026-02-22.jsonl") == given[::2]
    assert lines(tmp_path / "2026-02-23.jsonl") == given[1::2]


def test_a_line_that_a_crash_cut_off_is_written_again(tmp_path: Path) -> None:
    given = [event(number) for number in range(3)]
    with AuditLog(tmp_path) as log:
        log.append(given)
    file = tmp_path / "2026-02-22.jsonl"
    file.write_bytes(file.read_bytes()[:-20])

    with AuditLog(tmp_path) as log:
        assert log.append(given) == 1
    assert lines(file) == given


def test_a_line_that_a_kill_left_unsynced_is_synced_before_its_event_is_acked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a program that was killed once it had written a line to a new file
    file, known = tmp_path / "2026-02-22.jsonl", event(1)
    file.write_bytes(encode_event(known) + b"\n")

    synced: list[int] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        sync(descriptor)
        synced.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", noted)
    with AuditLog(tmp_path) as log:
        # When its event comes again, then both the line and the file's name are on the disk
        assert log.append([known]) == 0
        assert sorted(synced) == sorted([file.stat().st_ino, tmp_path.stat().st_ino])


def test_days_that_are_not_in_memory_any_more_are_known_from_their_files(tmp_path: Path) -> None:
    days = [event(number, NOON_MS + number * DAY_MS) for number in range(DAYS_OPEN + 2)]
    with AuditLog(tmp_path) as log:
        assert [log.append([one]) for one in days] == [1] * len(days)
        assert [log.append([one]) for one in days] == [0] * len(days)


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    given = [event(1)]
    with AuditLog(tmp_path) as log:
        with pytest.raises(BlockingIOError):
            AuditLog(tmp_path)
        assert log.append(given) == 1

    with AuditLog(tmp_path) as log:
        assert log.append(given) == 0


# --- Receiver -----------------------------------------------------------------------------------


def test_an_inbox_takes_an_event_once_and_remembers(tmp_path: Path) -> None:
    with closing(Inbox(tmp_path / "inbox.sqlite")) as inbox:
        assert [inbox.take("evt_1", b"x"), inbox.take("evt_1", b"x")] == [True, False]

    with closing(Inbox(tmp_path / "inbox.sqlite")) as inbox:
        assert not inbox.take("evt_1", b"x")


@pytest.mark.parametrize(
    "changed",
    [
        {ID: b"evt_\xff"},
        {SIGNATURE: b"v1,\xff"},
        {TIMESTAMP: b"\xff"},
        {TIMESTAMP: b"9" * 400},
    ],
)
async def test_a_receiver_refuses_headers_of_any_bytes(changed: dict[str, bytes]) -> None:
    secret = make_secret()
    taken: list[str] = []
    signed = {name: one.encode() for name, one in sign(secret, "evt_1", b"{}").items()} | changed
    lines = b"".join(b"%b: %b\r\n" % (name.encode(), one) for name, one in signed.items())
    runner = web.AppRunner(make_app([secret], lambda event_id, _: taken.append(event_id)))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0])
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 2\r\n")
        writer.write(lines + b"\r\n{}")
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    finally:
        await runner.cleanup()

    assert answer.startswith(b"HTTP/1.1 401 "), answer
    assert taken == []
