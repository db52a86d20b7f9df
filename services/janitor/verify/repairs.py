"""Repairs what a verification found and only takes space, each by its owner's own way.

- a payload object that nothing names, older than a day: deleted, as the job `unreferenced` does
- a claim of a queue's name without a queue: freed, once its broker has said that it needs it not
- an entry of the topology that still has no database: deleted

Nothing else is repaired: a count or a list that is wrong was written by a bug or has rotted, and
what it should say is not known. A message whose payload is lost becomes a dead letter when claimed.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import FOLDER, TopologyDirectory
from libs.storage.database.blobs import BLOB_PATH
from libs.storage.database.blobs import FOLDER as BLOBS
from libs.storage.database.roots import Root
from libs.storage.errors import ObjectNotFound
from libs.storage.objects.queue_names import FOLDER as QUEUE_NAMES
from libs.storage.objects.queue_names import QueueNames
from services.janitor.asking import asking
from services.janitor.verify.findings import Finding, Findings
from slatemq.v1.queue_name_pb2 import GetNameUseRequest, NameUse
from slatemq.v1.queue_name_pb2_grpc import QueueNameServiceStub

CALL_S: Final = 30.0

ENTRY_AGE_MS: Final = 3600 * 1000
"""How old an entry of the topology is that has no database: a shard that has just begun has one
within minutes."""


@dataclass
class Repairs:
    """Repairs findings; `counts` are what was done, or in a dry run would be.

    Attributes:
        repaired: The findings that are repaired.
    """

    root: Root
    directory: TopologyDirectory
    channels: Channels
    dry_run: bool
    counts: Counter[str] = field(default_factory=Counter, init=False)
    repaired: set[Finding] = field(default_factory=set, init=False)

    async def repair(self, findings: Findings) -> None:
        """Raises SlateMQError, StoreUnavailable; what was repaired before stays so."""
        names = QueueNames(self.root.objects)
        for finding in findings.leftovers:
            if finding.shard == BLOBS and BLOB_PATH.fullmatch(finding.key):
                if not self.dry_run:
                    await self.root.objects.delete(finding.key)
                self._note(finding, "objects_removed")
            elif finding.shard == FOLDER:
                if await self._is_old(finding.key) and not await self._has_database(finding.key):
                    if not self.dry_run:
                        await self.directory.remove(finding.key)
                    self._note(finding, "topology_entries_removed")
            elif finding.shard == QUEUE_NAMES and finding.queue_id:
                await self._free(finding, names)

    async def _is_old(self, path: str) -> bool:
        try:
            modified_ms = await self.root.objects.modified_ms(path)
        except ObjectNotFound:
            return False
        return modified_ms < time.time_ns() // 1_000_000 - ENTRY_AGE_MS

    async def _has_database(self, path: str) -> bool:
        """Whether the shard of an entry has a database by now: it may have come since."""
        service, _, shard = path.removeprefix(f"{FOLDER}/").removesuffix(".json").rpartition("-")
        return f"{service}/{shard}" in await self.root.objects.folders(service)

    async def _free(self, finding: Finding, names: QueueNames) -> None:
        """Free a claim as a creation would take it over: see `unique_names` of the broker.

        The claim is read first. A creation that comes later makes the claim after it, and one that
        is under way is noted by its broker; so of both only one is done.
        """
        claim = await names.get(finding.queue_id)
        if claim.broker_shard is None:
            return
        with asking("broker", claim.broker_shard):
            stub = QueueNameServiceStub(await self.channels.to("broker", claim.broker_shard))
            request = GetNameUseRequest(queue_id=finding.queue_id)
            answer = await stub.GetNameUse(request, timeout=CALL_S)
        if answer.broker_shard != claim.broker_shard or answer.use != NameUse.NAME_USE_NONE:
            return
        if not self.dry_run:
            await names.free(finding.queue_id, claim)
        self._note(finding, "names_freed")

    def _note(self, finding: Finding, count: str) -> None:
        self.counts[count] += 1
        self.repaired.add(finding)
