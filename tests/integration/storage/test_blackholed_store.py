"""Services whose S3 server is behind a network that swallows everything, for a while."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from libs.serving.process.healthprobe import probe
from libs.serving.process.store_watch import HUNG_MS
from slatemq import Client, ServiceStatus, connect
from slatemq.errors import SlateMQError
from tests.faults.faulty_store import Fault, FaultyStore, Outcome, faulty_store
from tests.integration.storage.s3_servers import CREDENTIALS, moto, root_url
from tests.integration.waiting import WAIT_SECONDS, eventually
from tests.ready_process import popen

pytestmark = [pytest.mark.slow, pytest.mark.s3]


@pytest.fixture
def store() -> Iterator[FaultyStore]:
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    with moto() as port, faulty_store(port) as before:
        yield before


class Owner:
    """An ingest or a broker, its own process."""

    def __init__(self, kind: str, folder: Path, url: str) -> None:
        self._ready, self._log = folder / f"{kind}.ready", folder / f"{kind}.log"
        command = [sys.executable, "-m", f"services.{kind}", "--root", url]
        command += ["--ready-file", str(self._ready), "--parent-pid", str(os.getpid())]
        with self._log.open("wb") as file:
            self.process = popen(command, stderr=file, env={**os.environ, **CREDENTIALS})

    async def serves(self) -> None:
        await eventually(lambda: self._ready.exists() or self.process.poll() is not None)
        assert self.process.poll() is None, self.said

    @property
    def address(self) -> str:
        return str(json.loads(self._ready.read_text())["peer_address"])

    @property
    def said(self) -> str:
        return self._log.read_text()

    def is_serving(self) -> bool:
        return not probe(self.address)

    def is_hung(self) -> bool:
        return "NOT_SERVING" in probe(self.address)

    def lines(self, words: str) -> list[str]:
        return [line for line in self.said.splitlines() if words in line]

    def end(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


async def test_a_store_behind_a_dead_network_is_seen_and_all_goes_on_when_it_is_back(
    tmp_path: Path, store: FaultyStore
) -> None:
    """Slow: a process says that its store hangs after ten seconds."""
    url = root_url(store.port, "blackholed")
    owners = [Owner(kind, tmp_path, url) for kind in ("ingest", "broker")]
    try:
        for owner in owners:
            await owner.serves()
        async with connect(owners[1].address) as client:
            await client.create_queue("q", filter="true")
            await client.publish(b"before")

            # When nothing passes any more, while an ingest and a broker have something to store
            store.set(Fault(Outcome.HOLD))
            publishing = asyncio.create_task(patiently(client, b"meanwhile"))
            creating = asyncio.create_task(tried(client))

            # Then both say so: their health, the status of the instance, and their logs
            for owner in owners:
                await eventually(owner.is_hung)
            fields = await until_both_say(client, "the object store has not answered for")
            for owner, kind in zip(owners, ("ingest", "broker"), strict=True):
                assert not fields[kind].serving
                assert len(owner.lines("not serving: the object store has not answered")) == 1
                waited = re.search(r"not answered for (\d+) s", fields[kind].detail)
                assert waited is not None
                assert int(waited[1]) * 1000 >= HUNG_MS

            # And not in every line, however often they look and are asked
            for owner in owners:
                assert len(owner.lines("object store")) <= 5, owner.said

            # And when packets pass again, they serve by themselves, with what they were told
            store.set()
            for owner in owners:
                await eventually(owner.is_serving)
                assert len(owner.lines("the object store answers again")) == 1
            await publishing
            await creating
            await client.publish(b"after")
            assert all(owner.process.poll() is None for owner in owners)
    finally:
        store.set()
        for owner in owners:
            owner.end()


async def until_both_say(client: Client, words: str) -> dict[str, ServiceStatus]:
    """The status of each service, once these words are in both."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            fields = {one.service: one for one in (await client.status()).services}
            if all(words in one.detail for one in fields.values()) and len(fields) == 2:
                return fields
            await asyncio.sleep(0.1)


async def patiently(client: Client, payload: bytes) -> int:
    """Publish for as long as it takes."""
    while True:
        try:
            return int(await client.publish(payload))
        except SlateMQError:
            await asyncio.sleep(0.1)


async def tried(client: Client) -> None:
    """Have the broker store something; whether it is answered does not matter here."""
    try:
        await client.create_queue("another", filter="true")
    except SlateMQError as error:
        logging.getLogger(__name__).info("not answered: %s", error)
