"""A start after a crash, on a store that is slow, silent for a while, or gone."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from libs.storage.database import integrity, opening
from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind, ReplayBound, Tuning, tuning_of
from libs.storage.database.slate import Batch, Database
from libs.storage.errors import StoreUnavailable
from libs.storage.objects.patience import patiently
from libs.storage.objects.small_objects import Objects
from tests.faults.faulty_store import Fault, FaultyStore, Outcome, faulty_store
from tests.integration.storage.s3_servers import CREDENTIALS, moto, root_url

pytestmark = [pytest.mark.s3, pytest.mark.usefixtures("watched_openings")]

NAME = "broker/0"
WAL = f"{NAME}/wal"
NEVER = ReplayBound(10**9, 10**9)
SILENCE_S = 2.0
PATIENCE_S = 60.0
PROGRESS = re.compile(f"opening {NAME}: 0 of about [1-5] WAL objects read")
"""Of five commits: on a busy machine, some share an object."""


@pytest.fixture(scope="module")
def store() -> Iterator[FaultyStore]:
    with moto() as port, faulty_store(port) as before:
        yield before


@pytest.fixture
def url(store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    yield root_url(store.port, f"opening/{secrets.token_hex(8)}")
    store.set()


@pytest.fixture
def root(url: str) -> Root:
    return open_root(url, timeout_s=PATIENCE_S)


@pytest.fixture
def impatient(url: str) -> Root:
    return open_root(url, timeout_s=SILENCE_S)


def _check_patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that answers anything counts as there, however busy the machine is."""
    check = Objects.check

    async def check_patiently(objects: Objects, timeout_s: float) -> None:
        await check(objects, max(timeout_s, PATIENCE_S))

    monkeypatch.setattr(Objects, "check", check_patiently)


def _bounded(bound: ReplayBound) -> Tuning:
    return replace(tuning_of(Kind.BROKER, "s3"), replay=bound)


async def _commit(database: Database, number: int) -> None:
    batch = Batch()
    batch.put(b"%06d" % number, b"v")
    await database.commit(batch)


async def _until(come: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not come():
            await asyncio.sleep(0.02)


async def test_a_start_asks_for_little_to_know_that_nothing_is_lost(
    store: FaultyStore, root: Root
) -> None:
    async def costs() -> int:
        before = store.count()
        wal = root.own_wal_store()
        await integrity.refuse_losses(root._admin(NAME), root.objects, wal, NAME, is_restored=False)
        return store.count() - before

    assert await costs() == 4
    database = await root.database(NAME, Kind.BROKER)
    await _commit(database, 1)
    await database.close()
    assert await costs() == 6


async def test_a_start_waits_for_as_long_as_the_store_answers_anything_at_all(
    store: FaultyStore,
    root: Root,
    impatient: Root,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _check_patiently(monkeypatch)
    # Given what a crash left, in WAL objects that the store does not give now
    crashed = await root.database(NAME, Kind.BROKER, _bounded(NEVER))
    for number in range(5):
        await _commit(crashed, number)
    hanging = Fault(Outcome.HANG, method="GET", match="/wal/")
    store.set(hanging)

    # When a start has been without progress for longer than a store may be silent
    starting = asyncio.create_task(impatient.database(NAME, Kind.BROKER))
    await _until(lambda: hanging.happened > 0 or starting.done())
    await _until(lambda: bool(PROGRESS.search(caplog.text)) or starting.done())

    # Then it is still waiting, has said how far it is, and goes on when the store does
    assert not starting.done()
    store.set()
    database = await starting
    assert await database.get(b"000004", durable=True) == b"v"
    await database.close()
    await crashed.close()


async def test_a_start_counts_what_is_to_be_read_once_the_store_lets_it(
    store: FaultyStore,
    root: Root,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given what a crash left, and a store that does not give the manifest now
    crashed = await root.database(NAME, Kind.BROKER, _bounded(NEVER))
    for number in range(5):
        await _commit(crashed, number)
    caplog.clear()  # where the first start was slow, it has said so
    monkeypatch.setattr(opening, "LOOK_S", 0.1)
    store.set(Fault(Outcome.HANG, method="GET", match="/manifest/"))
    starting = asyncio.create_task(root.database(NAME, Kind.BROKER))
    await _until(lambda: f"opening {NAME}: " in caplog.text or starting.done())
    assert "WAL objects" not in caplog.text

    # When it gives the manifest, and no WAL object
    store.set(Fault(Outcome.HANG, method="GET", match="/wal/"))

    # Then the start says how many of them it waits for
    await _until(lambda: bool(PROGRESS.search(caplog.text)) or starting.done())
    assert not starting.done()
    store.set()
    await (await starting).close()
    await crashed.close()


async def test_a_look_at_the_files_of_a_database_ends_where_the_store_does_not_give_them(
    store: FaultyStore, root: Root, impatient: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed = await root.database(NAME, Kind.BROKER, _bounded(NEVER))
    for number in range(5):
        await _commit(crashed, number)
    store.set(Fault(Outcome.HANG, method="GET", match="/manifest/"))
    with pytest.raises(StoreUnavailable, match=f"no answer within {SILENCE_S:g} s"):
        await impatient.files(NAME)
    store.set()
    files = await root.files(NAME)

    monkeypatch.setattr(integrity, "WAL_FILE_S", 0.5)
    hanging = Fault(Outcome.HANG, match="/wal/")
    store.set(hanging)
    assert await root.wal_fault(NAME, files) is not None
    assert hanging.happened
    store.set()
    await crashed.close()


async def test_a_start_ends_when_the_store_has_gone(
    store: FaultyStore, root: Root, impatient: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed = await root.database(NAME, Kind.BROKER, _bounded(NEVER))
    for number in range(5):
        await _commit(crashed, number)
    hanging = Fault(Outcome.HANG, method="GET", match="/wal/")
    store.set(hanging)

    with monkeypatch.context() as patched:
        _check_patiently(patched)
        starting = asyncio.create_task(impatient.database(NAME, Kind.BROKER))
        await _until(lambda: hanging.happened > 0 or starting.done())
    store.set(Fault(Outcome.HANG))

    with pytest.raises(StoreUnavailable, match=f"opening {NAME} stopped after"):
        await starting
    store.set()
    await crashed.close()


@pytest.mark.slow
async def test_a_start_opens_its_database_again_where_the_store_went_away_meanwhile(
    store: FaultyStore, root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    # Given what a crash left, and a store that gives no WAL object
    crashed = await root.database(NAME, Kind.BROKER, _bounded(NEVER))
    for number in range(5):
        await _commit(crashed, number)
    store.set(Fault(Outcome.RESET, method="GET", match="/wal/"))

    async def start() -> Database:
        with patiently():
            return await root.database(NAME, Kind.BROKER)

    # When SlateDB gives up opening it for a start
    starting = asyncio.create_task(start())
    await _until(lambda: "the start waits" in caplog.text or starting.done())

    # Then the start opens it again, and goes on when the store does
    assert not starting.done()
    store.set()
    database = await starting
    assert await database.get(b"000004", durable=True) == b"v"
    await database.close()
    await crashed.close()


@pytest.mark.proof
async def test_a_shard_opens_by_itself_in_a_store_that_is_down_for_most_of_the_time(
    store: FaultyStore, root: Root, impatient: Root
) -> None:
    # Given what a crash left, and a store that is silent for longer than a start waits for it
    crashed = await root.database(NAME, Kind.BROKER, _bounded(NEVER))
    for number in range(20):
        await _commit(crashed, number)
    away = Fault(Outcome.HOLD, window_s=(1.5 * SILENCE_S, 2 * SILENCE_S))
    store.set(away)

    # When it is started again and again, as a supervisor does
    async with asyncio.timeout(180):
        database = None
        while database is None:
            with suppress(StoreUnavailable):
                database = await impatient.database(NAME, Kind.BROKER)

    # Then it opens while the store is down most of the time, with all that there was
    assert away.happened
    store.set()
    assert await database.get(b"000019", durable=True) == b"v"
    await database.close()
    await crashed.close()


async def test_a_start_after_a_crash_has_a_bounded_number_of_objects_to_replay(
    store: FaultyStore, root: Root
) -> None:
    # Given a writer that is flushed every ten commits, and crashes after a hundred
    crashed = await root.database(NAME, Kind.BROKER, _bounded(ReplayBound(10, 10**9)))
    for number in range(100):
        await _commit(crashed, number)
    store.requests.clear()

    database = await root.database(NAME, Kind.BROKER)

    # A flush that is on its way when the writer ends leaves a few more than ten.
    assert store.count("GET", WAL) < 50
    assert await database.get(b"000099", durable=True) == b"v"
    await database.close()
    await crashed.close()


async def test_one_commit_of_a_life_is_enough_to_leave_the_next_nothing_of_the_lives_before(
    store: FaultyStore, root: Root
) -> None:
    # Given forty commits that were never flushed, and a life of a single commit behind them
    first = await root.database(NAME, Kind.BROKER, _bounded(NEVER))
    for number in range(40):
        await _commit(first, number)
    second = await root.database(NAME, Kind.BROKER)
    tables = store.count("PUT", f"{NAME}/compacted")
    manifests = store.count("PUT", f"{NAME}/manifest")
    await _commit(second, 40)
    await _until(lambda: store.count("PUT", f"{NAME}/compacted") > tables)
    await _until(lambda: store.count("PUT", f"{NAME}/manifest") > manifests)
    store.requests.clear()

    third = await root.database(NAME, Kind.BROKER)

    assert store.count("GET", WAL) < 20
    assert await third.get(b"000039", durable=True) == b"v"
    for database in (third, second, first):
        await database.close()


async def test_an_idle_shard_leaves_nothing_to_replay(store: FaultyStore, root: Root) -> None:
    database = await root.database(NAME, Kind.BROKER, _bounded(ReplayBound(10**9, 0.05)))
    for life in range(3):
        tables = store.count("PUT", f"{NAME}/compacted")
        await _commit(database, life)
        await _until(lambda before=tables: store.count("PUT", f"{NAME}/compacted") > before)  # type: ignore[misc]
    await database.close()


async def test_a_commit_beside_a_flush_is_flushed_though_none_comes_after_it(
    store: FaultyStore, root: Root
) -> None:
    # Given a flush that the store does not let end
    age_s = 0.05
    database = await root.database(NAME, Kind.BROKER, _bounded(ReplayBound(10**9, age_s)))
    held = Fault(Outcome.HOLD, method="PUT", match="/compacted")
    store.set(held)
    await _commit(database, 0)
    await _until(lambda: held.happened == 1)

    # When another commit is due to be flushed meanwhile
    await _commit(database, 1)
    await asyncio.sleep(4 * age_s)
    tables = store.count("PUT", f"{NAME}/compacted")
    store.set()

    # Then it is, once the first one has ended
    await _until(lambda: store.count("PUT", f"{NAME}/compacted") > tables)
    await database.close()
