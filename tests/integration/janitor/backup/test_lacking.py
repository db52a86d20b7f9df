"""Messages of a backup whose payload was gone before it was taken."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from libs.storage.database.roots import Root, open_root
from services.janitor.backup.command import main
from tests.integration.janitor.backup.stopped_instance import taking
from tests.integration.janitor.instances import instance

LARGE = 70_000
"""The size of a payload that is an object."""


async def test_messages_whose_payload_was_gone_before_the_backup_are_named(
    tmp_path: Path, backups: Root, capsys: pytest.CaptureFixture[str]
) -> None:
    # Given messages with small payloads and with large ones, in the log and in tables
    async with instance(tmp_path) as made:
        await made.client.create_queue("orders", filter='headers.queue == "orders"')
        await made.publish("orders", 20, payload=b"small")
        for text in (b"one", b"two", b"three"):
            await made.publish("orders", 1, payload=text.ljust(LARGE))
    root = open_root((tmp_path / "data").as_uri(), sync=False)
    verify = ["backup", "verify", "--backups", backups.url, "--messages"]

    # When all payloads are there, then no message lacks its own
    await taking(root, backups).take()
    assert await asyncio.to_thread(main, verify, {}) == 0
    assert "; no message lacks its payload" in capsys.readouterr().out

    # When the object of one goes before the next backup, then that names the message
    gone = (await root.objects.list("blobs"))[0]
    await root.objects.delete(gone)
    await taking(root, backups).take()
    assert await asyncio.to_thread(main, verify, {}) == 1
    said = capsys.readouterr()
    assert "the payloads of 1 message were gone before the backup was taken" in said.err
    (line,) = said.out.splitlines()
    assert line.startswith("lacks its payload: message ")
    assert line.endswith(f", {gone}")

    # And as JSON; without the option it is said that a payload is gone, and no more
    assert await asyncio.to_thread(main, [*verify, "--json"], {}) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["messages_lacking_count"] == 1
    assert f"message {found['messages_lacking'][0]}," in line
    assert await asyncio.to_thread(main, verify[:-1], {}) == 0
