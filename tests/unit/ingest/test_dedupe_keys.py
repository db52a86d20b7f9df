import asyncio
from collections.abc import AsyncIterator, Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch, Database
from libs.storage.errors import StoreUnavailable
from libs.storage.layout.own_keys import (
    dedupe_ends_range,
    dedupe_key,
)
from libs.storage.records.dedupe_records import decode_dedupe
from services.ingest.write import dedupe_keys
from services.ingest.write.dedupe_keys import DedupeKeys, Duplicates
from tests.forms import examples
from tests.unit.storage.oracles import parse_dedupe_ends_key, parse_dedupe_key

WINDOW_MS = 600_000
MINUTE_MS = 60_000
START_MS = 1_767_225_600_000


@pytest.fixture
async def database() -> AsyncIterator[Database]:
    opened = await open_root("memory:///").database("ingest/0", Kind.INGEST)
    yield opened
    await opened.close()


class Commits:
    """Publishes messages with dedupe keys as the publisher does, one commit at a time."""

    def __init__(self, database: Database, cached_max: int = 100) -> None:
        self.database, self.cached_max = database, cached_max
        self.known = DedupeKeys(database, WINDOW_MS, cached_max)
        self.next_id = 1

    def restart(self) -> None:
        self.known = DedupeKeys(self.database, WINDOW_MS, self.cached_max)

    async def publish(self, now_ms: int, *names: str) -> list[int]:
        """The IDs of one message per key."""
        duplicates = Duplicates(self.known, dict(enumerate(names)))
        await duplicates.hold()
        duplicates.look(now_ms)
        taken = duplicates.take(self.next_id, now_ms)
        fresh = iter(range(self.next_id, self.next_id + len(taken)))
        self.next_id += len(taken)
        await self.commit(now_ms, taken)
        duplicates.release()
        return [duplicates.found.get(at) or next(fresh) for at in range(len(names))]

    async def commit(self, now_ms: int, taken: Iterable[tuple[str, int]] = ()) -> None:
        batch = Batch()
        self.known.put(batch, list(taken), now_ms)
        if len(batch):
            await self.database.commit(batch)
        self.known.settle(list(taken))

    async def remove_ended(self, now_ms: int) -> None:
        while await self.known.find_ended(now_ms):
            await self.commit(now_ms)

    async def stored(self) -> set[str]:
        span = dedupe_key("\0")[:2]
        return {
            parse_dedupe_key(key)
            async for rows in self.database.scan(span, span + b"\xff")
            for key, _ in rows
        }

    async def ends(self) -> list[int]:
        """The minutes of the rows that tell what ends, relative to the start."""
        return [
            parse_dedupe_ends_key(key).minute - START_MS // MINUTE_MS
            async for rows in self.database.scan(*dedupe_ends_range(0, (1 << 32) - 1))
            for key, _ in rows
        ]


async def test_a_key_stands_for_its_message_until_its_end_and_not_a_moment_longer(
    database: Database,
) -> None:
    commits = Commits(database)
    assert await commits.publish(START_MS, "a", "b", "a") == [1, 2, 1]
    for restarted in (False, True):
        if restarted:
            commits.restart()
        assert await commits.publish(START_MS + WINDOW_MS - 1, "b", "a") == [2, 1]
    # The row is still there, and means nothing
    assert await commits.publish(START_MS + WINDOW_MS, "a") == [3]
    assert await commits.publish(START_MS + 2 * WINDOW_MS - 1, "a") == [3]


async def test_what_has_ended_is_removed_but_for_keys_that_were_reused(
    database: Database,
) -> None:
    commits = Commits(database)
    await commits.publish(START_MS, "old", "renewed")
    await commits.publish(START_MS + 2 * MINUTE_MS, "young")
    assert await commits.ends() == [10, 12]
    await commits.publish(START_MS + WINDOW_MS, "renewed")

    # Nothing before the minute is over
    await commits.remove_ended(START_MS + WINDOW_MS + MINUTE_MS - 1)
    assert await commits.stored() == {"old", "renewed", "young"}

    await commits.remove_ended(START_MS + WINDOW_MS + MINUTE_MS)
    assert await commits.stored() == {"renewed", "young"}
    assert await commits.ends() == [12, 20]
    assert await commits.publish(START_MS + WINDOW_MS + MINUTE_MS, "renewed", "old") == [4, 5]


async def test_a_process_removes_what_its_predecessor_left(database: Database) -> None:
    commits = Commits(database)
    for minute in range(3):
        await commits.publish(START_MS + minute * MINUTE_MS, f"m{minute}")
    commits.restart()
    await commits.remove_ended(START_MS + WINDOW_MS + 2 * MINUTE_MS)
    assert await commits.stored() == {"m2"}
    await commits.remove_ended(START_MS + WINDOW_MS + 3 * MINUTE_MS)
    assert await commits.stored() == set()
    assert await commits.ends() == []


async def test_removing_goes_in_small_batches(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dedupe_keys, "ENDED_KEYS", 40)
    monkeypatch.setattr(dedupe_keys, "ROW_KEYS_MAX", 10)
    commits = Commits(database)
    for n in range(30):
        await commits.publish(START_MS, *(f"{n} {m}" for m in range(25)))
    late_ms = START_MS + WINDOW_MS + MINUTE_MS
    left = [len(await commits.stored())]
    while await commits.known.find_ended(late_ms):
        await commits.commit(late_ms)
        left.append(len(await commits.stored()))
    assert left[0] == 750
    assert left[-1] == 0
    assert max(before - after for before, after in pairwise(left)) <= 80
    assert await commits.ends() == []


async def test_a_burst_after_quiet_minutes_is_removed_in_small_batches(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dedupe_keys, "ENDED_KEYS", 40)
    monkeypatch.setattr(dedupe_keys, "ROW_KEYS_MAX", 10)
    commits = Commits(database)
    for n in range(300):
        await commits.publish(START_MS, f"quiet {n}")
    for n in range(100):
        await commits.publish(START_MS + MINUTE_MS, *(f"{n} {m}" for m in range(10)))
    late_ms = START_MS + WINDOW_MS + 3 * MINUTE_MS
    while await commits.known.find_ended(late_ms):
        assert len(commits.known._ended) < 50
        await commits.commit(late_ms)
    assert await commits.stored() == set()
    assert await commits.ends() == []


async def test_a_key_reused_whose_row_is_being_written_stays(database: Database) -> None:
    commits = Commits(database, cached_max=0)
    await commits.publish(START_MS, "a", "b")
    late_ms = START_MS + WINDOW_MS + MINUTE_MS
    restarted = Duplicates(commits.known, {0: "a"})
    await restarted.hold()
    restarted.look(late_ms)
    taken = restarted.take(3, late_ms)
    commits.next_id = 4
    batch = Batch()
    commits.known.put(batch, taken, late_ms)
    # Drained, and not in the database yet: the row there still says that the key has ended.
    assert await commits.known.find_ended(late_ms)
    await database.commit(batch)
    commits.known.settle(taken)
    restarted.release()
    await commits.commit(late_ms)
    assert await commits.stored() == {"a"}
    assert await commits.publish(late_ms, "a", "b") == [3, 4]


@pytest.mark.parametrize("moment", ["found", "looked up"])
async def test_a_key_reused_while_it_is_being_removed_stays(
    database: Database, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    commits = Commits(database, cached_max=0)
    await commits.publish(START_MS, "a", "b")
    late_ms = START_MS + WINDOW_MS + MINUTE_MS
    if moment == "found":
        # Found, and not deleted yet
        assert await commits.known.find_ended(late_ms)
        assert await commits.publish(late_ms, "a") == [3]
    else:
        # Read as ended, when a commit comes between
        read = Database.get_many
        between = [lambda: commits.publish(late_ms, "a")]

        async def get_many(
            self: Database, keys: Iterable[bytes], durable: bool = False
        ) -> list[bytes | None]:
            values = await read(self, keys, durable)
            if between and not durable:
                assert await between.pop()() == [3]
            return values

        monkeypatch.setattr(Database, "get_many", get_many)
        assert await commits.known.find_ended(late_ms)
        assert not between
    await commits.commit(late_ms)
    assert await commits.stored() == {"a"}
    value = await database.get(dedupe_key("a"))
    assert value is not None
    assert decode_dedupe(value) == (3, late_ms + WINDOW_MS)
    assert await commits.publish(late_ms, "a", "b") == [3, 4]


async def test_a_key_that_is_given_up_leaves_no_trace(database: Database) -> None:
    commits = Commits(database)
    given_up = Duplicates(commits.known, {0: "a", 1: "b"})
    await given_up.hold()
    given_up.look(START_MS)
    assert given_up.found == {}
    given_up.release()
    assert await commits.publish(START_MS, "b", "a") == [1, 2]
    assert await commits.stored() == {"a", "b"}


async def test_memory_is_bounded_and_nothing_is_forgotten(database: Database) -> None:
    commits = Commits(database, cached_max=10)
    names = [f"n{n}" for n in range(1000)]
    first = await commits.publish(START_MS, *names)
    assert await commits.publish(START_MS, *names) == first
    assert (len(commits.known._cached), len(commits.known._held)) == (10, 0)


async def test_a_failed_reading_fails_those_who_wait_and_none_after_them(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = Commits(database)
    await commits.publish(START_MS, "a")
    commits.restart()
    with monkeypatch.context() as away:

        async def get_many(*_: object, **__: object) -> list[bytes | None]:
            raise StoreUnavailable("down")

        away.setattr(Database, "get_many", get_many)
        failed = await asyncio.gather(
            *(commits.known.hold(["a", "b"]) for _ in range(3)), return_exceptions=True
        )
        assert [type(error) for error in failed] == [StoreUnavailable] * 3
    assert await commits.publish(START_MS, "a", "b") == [1, 2]


async def test_a_caller_that_leaves_while_keys_are_read_disturbs_no_other(
    database: Database,
) -> None:
    commits = Commits(database)
    await commits.publish(START_MS, "a")
    commits.restart()
    leaving = asyncio.create_task(commits.known.hold(["a"]))
    staying = asyncio.create_task(commits.publish(START_MS, "a", "b"))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == [1, 2]
    assert commits.known._held == {}


names = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=5)
steps = st.lists(
    st.one_of(
        names.map(lambda some: ("publish", some)),
        st.integers(0, WINDOW_MS).map(lambda ms: ("advance", ms)),
        st.sampled_from([("restart", 0), ("remove", 0)]),
    ),
    max_size=25,
)


@settings(max_examples=examples(60), deadline=None)
@given(steps, st.sampled_from([0, 2, 100]))
def test_histories_agree_with_a_dictionary(
    history: list[tuple[str, list[str] | int]], cached_max: int
) -> None:
    async def run() -> None:
        database = await open_root("memory:///").database("ingest/0", Kind.INGEST)
        commits = Commits(database, cached_max)
        model: dict[str, tuple[int, int]] = {}
        now_ms, next_id = START_MS, 1
        for step, value in history:
            if isinstance(value, list):
                expected = []
                for name in value:
                    if model.get(name, (0, 0))[1] <= now_ms:
                        model[name] = (next_id, now_ms + WINDOW_MS)
                        next_id += 1
                    expected.append(model[name][0])
                assert await commits.publish(now_ms, *value) == expected
            elif step == "advance":
                now_ms += value
            elif step == "restart":
                commits.restart()
            else:
                await commits.remove_ended(now_ms)
                over_ms = now_ms // MINUTE_MS * MINUTE_MS
                kept = {name for name, (_, end_ms) in model.items() if end_ms >= over_ms}
                assert await commits.stored() == kept
            assert commits.known._held == {}
        await database.close()

    asyncio.run(run())
