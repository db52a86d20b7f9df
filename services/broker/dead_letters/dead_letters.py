"""All policies about the dead letters, and other entries, of one shard, on one mover."""

from __future__ import annotations

from services.broker.dead_letters.mover import Mover
from services.broker.dead_letters.redrive_runner import RedriveRunner
from services.broker.dead_letters.removals import Archiver, Remover
from services.broker.dead_letters.settler import DeadLetterSettler
from services.broker.delivery.message_cache import Ingests
from services.broker.entries.finished_pages import ListReaders
from services.broker.outbox.pusher import Pusher
from services.broker.shard.owner import ShardOwner


class DeadLetters:
    """What moves entries out of the stored rows of one shard's queues."""

    def __init__(
        self,
        shard: int,
        owner: ShardOwner,
        lists: ListReaders,
        pusher: Pusher,
        ingests: Ingests,
        grace_s: int,
    ) -> None:
        self.mover = Mover(owner, lists, pusher)
        self.redrives = RedriveRunner(self.mover, ingests)
        self.settler = DeadLetterSettler(self.mover, shard)
        self.archiver = Archiver(self.mover)
        self.remover = Remover(self.mover, grace_s)
