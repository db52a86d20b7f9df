from __future__ import annotations

import os
from pathlib import Path

import pytest

from libs.storage.database.blobs import Blobs
from libs.storage.database.roots import Root, open_root
from libs.storage.errors import DamagedObject, ForeignUri, ObjectNotFound, StoreUnavailable
from libs.storage.objects.durability import FolderSync


@pytest.fixture(params=["file", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    return open_root(tmp_path.as_uri() if request.param == "file" else "memory:///")


@pytest.mark.parametrize("size", [0, 1, 65_536, 1 << 20])
async def test_a_payload_comes_back_from_its_uri(root: Root, size: int) -> None:
    blobs = Blobs(root)
    payload = os.urandom(size)

    uri = await blobs.put(payload)

    assert uri.startswith("blobs/")
    assert await blobs.get(uri) == payload
    await blobs.delete(uri)
    with pytest.raises(ObjectNotFound):
        await blobs.get(uri)
    await blobs.delete(uri)


async def test_each_payload_has_a_name_of_its_own(root: Root) -> None:
    blobs = Blobs(root)
    assert len({await blobs.put(b"same") for _ in range(50)}) == 50


async def test_a_uri_that_is_no_payloads_is_refused(root: Root) -> None:
    blobs = Blobs(root)
    outside = [
        "",
        "file:///etc/passwd",
        "s3://other/blobs/00/11",
        "topology/00/11",
        "blobs/../secret",
        "blobs/00/../../x",
        "blobs/00/",
        "blobs/00/11",
        f"/blobs/00/{'1' * 62}",
        f"blobs/00/{'1' * 61}",
        f"blobs/00/11/{'1' * 62}",
        f"blobs/00/{'1' * 62}?x=1",
    ]
    for uri in outside:
        with pytest.raises(ForeignUri):
            await blobs.get(uri)
        with pytest.raises(ForeignUri):
            await blobs.delete(uri)


def change(path: Path, damage: str, other: Path) -> None:
    stored = path.read_bytes()
    changed = {
        "flip": bytes((stored[0] ^ 4,)) + stored[1:],
        "cut": stored[:-1],
        "grow": stored + b"\0",
        "swap": other.read_bytes(),
    }
    path.write_bytes(changed[damage])


@pytest.mark.parametrize("size", [1, 65_536, (8 << 20) + 1])
@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "swap"])
async def test_a_payload_that_has_changed_in_the_store_is_never_returned(
    tmp_path: Path, size: int, damage: str
) -> None:
    blobs = Blobs(open_root(tmp_path.as_uri()))
    payload = os.urandom(size)
    uri, other = await blobs.put(payload), await blobs.put(payload[:-1] + bytes([payload[-1] ^ 1]))
    change(tmp_path / uri, damage, tmp_path / other)

    with pytest.raises(DamagedObject):
        await blobs.get(uri)
    with pytest.raises(DamagedObject):
        await blobs.get_slowly(uri, silence_s=60)
    with pytest.raises(DamagedObject):
        await blobs.check(blobs.path_of(uri), size)
    await blobs.check(blobs.path_of(other), size)
    with pytest.raises(DamagedObject):  # a record that says another size
        await blobs.check(blobs.path_of(other), size + 1)


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_a_blob_on_a_disk_is_synced_before_its_uri_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    real = FolderSync.sync

    async def watching(self: FolderSync) -> None:
        there = files_below(tmp_path)
        await real(self)
        synced.extend(there)

    monkeypatch.setattr(FolderSync, "sync", watching)
    uri = await Blobs(open_root(tmp_path.as_uri())).put(b"payload")

    assert synced == [tmp_path / uri]


async def test_a_folder_that_is_gone_is_reported_not_swallowed(tmp_path: Path) -> None:
    root = open_root(tmp_path.as_uri())
    (tmp_path / "blobs").write_text("in the way")
    with pytest.raises(StoreUnavailable):
        await Blobs(root).put(b"payload")
