"""Edits at an ingest that has taken its shard from a process that still runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.storage.database.roots import open_root
from libs.storage.errors import StoreUnavailable
from libs.storage.objects.small_objects import Objects
from services.broker.delivery.message_cache import FETCH_BYTES, Ingests
from slatemq.errors import Unavailable
from slatemq.v1 import ingest_pb2
from tests.integration.broker.rig import running
from tests.integration.ingest.server import serving


async def test_what_was_edited_is_not_read_from_the_process_that_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path.as_uri()
    async with serving(root) as first, running(tmp_path) as rig:
        directory = TopologyDirectory(open_root(root).objects)
        channels, editor = Channels(directory), rig.broker.editor
        ingests = editor._ingests = Ingests(channels)

        async def payload(message_id: int) -> bytes:
            ((message,), _, _) = await ingests.read(0, [message_id], FETCH_BYTES)
            return bytes(message.payload)

        # Given a broker that has read from an ingest, which does not know yet that it was replaced
        (message_id,) = await first.send(b"old")
        assert await payload(message_id) == b"old"
        async with serving(root) as second:
            edit = ingest_pb2.ReplaceMessageRequest(
                message_id=message_id, payload=b"new", keep_headers=True
            )
            await second.stub.ReplaceMessage(edit)

            # When it cannot see who owns the shard, then the edit is not answered
            with monkeypatch.context() as down:

                async def refuse(*_: object, **__: object) -> None:
                    raise StoreUnavailable("the store is away")

                down.setattr(Objects, "describe", refuse)
                with pytest.raises(Unavailable, match="may be delivered as it was, retry"):
                    await editor.forget(message_id)

            # When it drops the message, then it reads what the edit made
            await editor.forget(message_id)
            assert await payload(message_id) == b"new"
        await channels.close()
        await directory.close()
