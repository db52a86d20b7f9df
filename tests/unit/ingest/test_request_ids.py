import asyncio
from collections.abc import AsyncIterator

import pytest

from libs.storage.database.roots import Root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch, Database
from libs.storage.layout.own_keys import (
    parse_request_ids_key,
    request_ids_range,
)
from services.ingest.write import request_ids
from services.ingest.write.request_ids import TABLES, Answered, RequestIds
from slatemq.errors import InvalidArgument

WINDOW_MS = 600_000
MINUTE_MS = 60_000
START_MS = 1_767_225_600_000
PRINT = b"f" * 16


@pytest.fixture
async def database(root: Root) -> AsyncIterator[Database]:
    opened = await root.database("ingest/0", Kind.INGEST)
    yield opened
    await opened.close()


class Commits:
    """Commits request IDs as the publisher does, one commit at a time."""

    def __init__(self, database: Database, requests: RequestIds) -> None:
        self.database, self.requests = database, requests
        self.next_id = 1

    async def publish(self, now_ms: int, *names: str) -> list[Answered]:
        answers = []
        for name in names:
            assert await self.requests.begin(name, PRINT) is None
            answers.append((name, Answered(self.next_id, 2)))
            self.next_id += 2
        batch = Batch()
        rows = self.requests.put(batch, answers, now_ms)
        if len(batch):
            await self.database.commit(batch)
        self.requests.settle(rows, answers)
        return [answered for _, answered in answers]

    async def rows(self) -> list[int]:
        """The minutes of all rows, relative to the start."""
        span = request_ids_range(0, (1 << 32) - 1)
        return [
            parse_request_ids_key(key).minute - START_MS // MINUTE_MS
            async for rows in self.database.scan(*span)
            for key, _ in rows
        ]


async def test_a_request_id_is_known_for_the_window_and_then_deleted(database: Database) -> None:
    requests = RequestIds(database, WINDOW_MS)
    commits = Commits(database, requests)
    first = await commits.publish(START_MS, "a")

    # Known at the last moment of the window
    requests.clean_up(START_MS + WINDOW_MS)
    assert [await requests.begin("a", PRINT)] == first
    with pytest.raises(InvalidArgument):
        await requests.begin("a", b"g" * 16)

    # Forgotten two minutes later at the latest, in memory and on disk
    requests.clean_up(START_MS + WINDOW_MS + 2 * MINUTE_MS)
    assert await commits.rows() == [0]
    await commits.publish(START_MS + WINDOW_MS + 2 * MINUTE_MS)
    assert await commits.rows() == []
    assert await requests.begin("a", PRINT) is None


async def test_sealed_tables_still_answer(database: Database) -> None:
    requests = RequestIds(database, WINDOW_MS)
    commits = Commits(database, requests)
    names = [f"n{n}" for n in range(500)]
    answers = await commits.publish(START_MS, *names)
    for _ in range(TABLES):
        requests.clean_up(START_MS + 2 * MINUTE_MS)

    assert [await requests.begin(name, PRINT) for name in names] == answers
    assert await requests.begin("another", PRINT) is None


async def test_colliding_hashes_are_distinguished_by_their_rows(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_ids, "hash", lambda text: len(text), raising=False)
    requests = RequestIds(database, WINDOW_MS)
    commits = Commits(database, requests)
    names = ["aa", "bb", "cc"]
    answers = [(await commits.publish(START_MS, name))[0] for name in names]
    assert [await requests.begin(name, PRINT) for name in names] == answers
    for _ in range(TABLES):
        requests.clean_up(START_MS + 2 * MINUTE_MS)
    assert [await requests.begin(name, PRINT) for name in names] == answers
    assert await requests.begin("dd", PRINT) is None


async def test_a_start_knows_the_window_and_deletes_what_its_predecessor_left(
    database: Database,
) -> None:
    commits = Commits(database, RequestIds(database, WINDOW_MS))
    for minute in range(5):
        await commits.publish(START_MS + minute * MINUTE_MS, f"m{minute}")

    # Given a start when the first three are past the window
    now_ms = START_MS + WINDOW_MS + 3 * MINUTE_MS
    requests = RequestIds(database, WINDOW_MS)
    await requests.load(START_MS + 4 * MINUTE_MS, now_ms)

    # Then the others are known, and the first are deleted by the next commit
    assert await requests.begin("m3", PRINT) == Answered(7, 2)
    assert await requests.begin("m4", PRINT) == Answered(9, 2)
    assert await requests.begin("m2", PRINT) is None
    requests.forget("m2")
    after = Commits(database, requests)
    after.next_id = 100
    await after.publish(now_ms)
    assert await after.rows() == [3, 4]


async def test_a_commit_of_many_requests_makes_rows_of_bounded_size(database: Database) -> None:
    requests = RequestIds(database, WINDOW_MS)
    commits = Commits(database, requests)
    names = [f"n{n}" for n in range(2500)]
    answers = await commits.publish(START_MS, *names)
    assert len(await commits.rows()) == 3
    assert [await requests.begin(name, PRINT) for name in names[::100]] == answers[::100]


async def test_few_rows_are_deleted_with_a_commit_and_many_by_an_idle_one(
    database: Database,
) -> None:
    requests = RequestIds(database, WINDOW_MS)
    commits = Commits(database, requests)
    for n in range(30):
        await commits.publish(START_MS, f"n{n}")
    late_ms = START_MS + WINDOW_MS + 2 * MINUTE_MS
    await commits.publish(late_ms, "late")
    assert len(await commits.rows()) == 31 - request_ids.DELETIONS_PER_COMMIT
    await commits.publish(late_ms)
    assert len(await commits.rows()) == 1


async def test_a_failed_publish_frees_its_id_for_one_of_those_who_wait(database: Database) -> None:
    requests = RequestIds(database, WINDOW_MS)
    assert await requests.begin("a", PRINT) is None
    waiting = [asyncio.create_task(requests.begin("a", PRINT)) for _ in range(3)]
    await asyncio.sleep(0)
    requests.forget("a")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [task.done() for task in waiting].count(True) == 1
    for _ in range(2):
        requests.forget("a")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert [task.result() for task in waiting] == [None] * 3
