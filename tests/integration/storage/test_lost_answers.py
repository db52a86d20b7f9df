"""First writes to a store that does what it is asked, and whose answer never arrives."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from libs.storage.database.blobs import Blobs
from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch
from libs.storage.objects.probe import probe_store
from services.janitor.runs.history import Run, RunRequest, RunStore, State, Trigger, new_run_id
from tests.faults.faulty_store import Fault, FaultyStore, Outcome, faulty_store
from tests.integration.storage.s3_servers import CREDENTIALS, moto, root_url

pytestmark = pytest.mark.s3


@pytest.fixture(scope="module")
def store() -> Iterator[FaultyStore]:
    with moto() as port, faulty_store(port) as before:
        yield before


@pytest.fixture
def root(store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Root]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    yield open_root(root_url(store.port, f"lost/{secrets.token_hex(8)}"))
    store.set()


def _lost(method: str, match: str = "") -> Fault:
    return Fault(Outcome.LOSE, method=method, match=match, times=1)


@pytest.mark.parametrize(
    ("method", "match"),
    [("PUT", "/probe/"), ("GET", "/probe/"), ("HEAD", "/probe/"), ("POST", "?delete")],
)
async def test_the_probe_of_a_store_outlives_a_lost_answer(
    store: FaultyStore, root: Root, method: str, match: str
) -> None:
    lost = _lost(method, match)
    store.set(lost)

    await probe_store(root.objects)

    assert lost.happened == 1
    store.set()
    assert await root.objects.list("probe") == []


async def test_an_object_created_with_a_lost_answer_counts_as_created(
    store: FaultyStore, root: Root
) -> None:
    lost = _lost("PUT")
    store.set(lost)

    assert await root.objects.put_if_absent("names/a", b"mine")
    assert lost.happened == 1
    assert await root.objects.put_if_absent("names/a", b"mine")
    assert not await root.objects.put_if_absent("names/a", b"another's")
    assert await root.objects.get("names/a") == b"mine"


async def test_an_object_replaced_with_a_lost_answer_counts_as_replaced(
    store: FaultyStore, root: Root
) -> None:
    await root.objects.put("names/b", b"1")
    _, tag = await root.objects.get_version("names/b")
    lost = _lost("PUT")
    store.set(lost)

    newer = await root.objects.replace("names/b", b"2", tag)

    assert lost.happened == 1
    assert newer is not None
    assert await root.objects.get_version("names/b") == (b"2", newer)
    assert await root.objects.replace("names/b", b"3", tag) is None


async def test_a_large_payload_is_stored_although_the_answer_is_lost(
    store: FaultyStore, root: Root
) -> None:
    lost = _lost("PUT", "/blobs/")
    store.set(lost)

    uri = await Blobs(root).put(b"x" * 70_000)

    assert lost.happened == 1
    assert await Blobs(root).get(uri) == b"x" * 70_000


async def test_a_run_of_the_janitor_is_created_and_saved_although_answers_are_lost(
    store: FaultyStore, root: Root
) -> None:
    runs = RunStore(root.objects)
    run = Run(
        new_run_id("report", 1),
        RunRequest("report"),
        Trigger.REQUEST,
        State.WAITING,
        0,
        "p",
        created_at_ms=1,
    )
    for_create, for_save = _lost("PUT"), _lost("PUT")

    store.set(for_create)
    stored = await runs.create(run)
    store.set(for_save)
    saved = await runs.save(stored, run)

    assert saved
    assert (for_create.happened, for_save.happened) == (1, 1)


@pytest.mark.parametrize("part", ["/manifest/", "/wal/", "/compactions/"])
async def test_a_database_opens_and_commits_although_answers_are_lost(
    store: FaultyStore, root: Root, part: str
) -> None:
    lost = _lost("PUT", part)
    store.set(lost)

    database = await root.database("broker/0", Kind.BROKER)
    batch = Batch()
    batch.put(b"k", b"v")
    await database.commit(batch)

    assert await database.get(b"k", durable=True) == b"v"
    assert lost.happened == 1
    await database.close()
