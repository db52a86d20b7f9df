"""Owners of shards do not start on a database of another format, and say what to do."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from libs.storage.database.formats import FORMAT
from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch
from libs.storage.layout.own_keys import FORMAT_KEY
from libs.storage.records.states import FormatRecord, encode_format
from tests.made_instances import make_instance


@pytest.mark.parametrize("kind", [Kind.INGEST, Kind.BROKER])
async def test_an_owner_ends_permanently_where_its_shard_has_another_format(
    tmp_path: Path, kind: Kind
) -> None:
    name = kind.name.lower()
    root = open_root(tmp_path.as_uri())
    await make_instance(root)
    database = await root.database(f"{name}/0", kind)
    batch = Batch()
    batch.put(FORMAT_KEY, encode_format(FormatRecord(FORMAT + 1, f"{name}/0")))
    await database.commit(batch)
    await database.close()

    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"services.{name}", "--root", tmp_path.as_uri(), "--port", "0"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await owner.communicate()

    assert owner.returncode == 2, err
    said = f"{name}/0 below {tmp_path.as_uri()} has format {FORMAT + 1}, and this version of"
    assert said in err.decode()
    assert "run the version that wrote it, or give another root" in err.decode()
