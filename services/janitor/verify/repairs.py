"""Repairs what a verification found and only takes space, each by its owner's own way.

- a payload object that nothing names, older than a day: deleted, as the job `unreferenced` does
- a claim of a queue's name without a queue: freed, once its broker has said that it needs it not,
  or has been given up

Nothing is removed where a shard could not be read whole, or is lost: it may need any of these.

Nothing else is repaired: a count or a list that is wrong was written by a bug or has rotted, and
what it should say is not known. A message whose payload is lost becomes a dead letter when claimed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.storage.database.blobs import BLOB_PATH
from libs.storage.database.blobs import FOLDER as BLOBS
from libs.storage.database.roots import Root
from libs.storage.objects.queue_names import FOLDER as QUEUE_NAMES
from libs.storage.objects.queue_names import QueueNames
from services.janitor.asking import asking
from services.janitor.verify.findings import Finding, Findings
from slatemq.v1.queue_name_pb2 import GetNameUseRequest, NameUse
from slatemq.v1.queue_name_pb2_grpc import QueueNameServiceStub

CALL_S: Final = 30.0


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
        if findings.unreadable:
            return
        names = QueueNames(self.root.objects)
        for finding in findings.leftovers:
            if finding.shard == BLOBS and BLOB_PATH.fullmatch(finding.key):
                if not self.dry_run:
                    await self.root.objects.delete(finding.key)
                self._note(finding, "objects_removed")
            elif finding.shard == QUEUE_NAMES and finding.queue_id:
                await self._free(finding, names)

    async def _free(self, finding: Finding, names: QueueNames) -> None:
        """Free a claim as a creation would take it over: see `unique_names` of the broker.

        The claim is read first. A creation that comes later makes the claim after it, and one that
        is under way is noted by its broker; so of both only one is done.
        """
        claim = await names.get(finding.queue_id)
        if not claim.broker_shards:
            return
        for shard in claim.broker_shards:
            is_given_up = await self._is_given_up(shard)
            if not is_given_up and await self._is_used(finding.queue_id, shard):
                return
        if not self.dry_run:
            await names.free(finding.queue_id, claim)
        self._note(finding, "names_freed")

    async def _is_given_up(self, shard: int) -> bool:
        """Whether a broker has no entry and no database, by which an operator gives it up.

        One of that number that has begun since the claim was read makes claims of its own.
        """
        known = await self.directory.read(max_age_ms=0)
        return shard not in known.brokers and (
            f"broker/{shard}" not in await self.root.objects.folders("broker")
        )

    async def _is_used(self, queue_id: str, shard: int) -> bool:
        with asking("broker", shard):
            stub = QueueNameServiceStub(await self.channels.to("broker", shard))
            answer = await stub.GetNameUse(GetNameUseRequest(queue_id=queue_id), timeout=CALL_S)
        return answer.broker_shard != shard or answer.use != NameUse.NAME_USE_NONE

    def _note(self, finding: Finding, count: str) -> None:
        self.counts[count] += 1
        self.repaired.add(finding)
