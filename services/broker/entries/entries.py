"""All that looks at the entries of one shard's queues, and edits them."""

from __future__ import annotations

from libs.serving.requests.budget import AnswerBudget
from libs.storage.database.slate import Database
from services.broker.delivery.dispatcher import Dispatcher
from services.broker.delivery.message_cache import Ingests, Payloads
from services.broker.entries.conversion import EntryReader
from services.broker.entries.delayed import DelayedCleaner, DelayedWatches
from services.broker.entries.editor import Invalidator, MessageEditor
from services.broker.entries.finder import EntryFinder
from services.broker.entries.finished_pages import list_readers
from services.broker.entries.lister import EntryLister
from services.broker.entries.waiting_pages import WaitingReader
from services.broker.shard.owner import ShardOwner


class Entries:
    """Finds, lists, reads, watches and edits the entries of one shard's queues."""

    def __init__(
        self,
        owner: ShardOwner,
        database: Database,
        last_ms: int,
        delivery: Dispatcher,
        payloads: Payloads,
        ingests: Ingests,
        invalidator: Invalidator,
        budget: AnswerBudget,
    ) -> None:
        """`last_ms` is the time of the last commit before the start."""
        waiting = WaitingReader(database)
        self.lists = list_readers(database)
        self.reader = EntryReader(owner, database, ingests, budget)
        self.finder = EntryFinder(owner, waiting, self.lists)
        self.lister = EntryLister(owner, waiting, self.lists, self.reader)
        self.watches = DelayedWatches(owner, database, self.reader)
        self.cleaner = DelayedCleaner(owner, database, last_ms)
        self.editor = MessageEditor(owner, delivery, payloads, ingests, invalidator)
