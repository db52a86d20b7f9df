"""SlateMQ: a durable message queue whose only durable state is an object store.

    async with slatemq.connect("127.0.0.1:7420") as client:
        await client.publish(b"hello", {"queue": "greetings"})

`slatemq.sync` has the same for programs without asyncio, `slatemq.errors` every error, `slatemq.v1`
the generated protobuf messages and stubs.
"""

from __future__ import annotations

import os
from importlib import import_module

# Before gRPC is loaded: the fork handlers of its core crash children that never call it. Python's
# gRPC has them off unless the program turns them on, but the core goes by the variable alone.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

TYPE_CHECKING = False  # that of typing, without loading it: the command begins here
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from slatemq.archived import ArchivedLetter, ArchivedOutcome
    from slatemq.batches import BatchConsumer
    from slatemq.client import Client, connect
    from slatemq.commands import (
        CommandContext,
        CommandResult,
        Complete,
        Extend,
        Fail,
        Push,
        Release,
        Transfer,
    )
    from slatemq.consumer import Consumer
    from slatemq.delivered import Batch, Received
    from slatemq.entry_models import (
        Archived,
        Attempt,
        Entry,
        EntryPage,
        EntryState,
        EntryView,
        SearchProgress,
        StoredMessage,
    )
    from slatemq.events_status import EventsStatus
    from slatemq.janitor import JobProgress, JobRun, JobRunState
    from slatemq.message_refs import MessageLease, MessageRefs, MessageToken, MessageView
    from slatemq.models import (
        BatchSettings,
        Explanation,
        OutgoingMessage,
        RouteStatus,
        ServiceStatus,
        Status,
        Topology,
    )
    from slatemq.published import Published
    from slatemq.queue_commands import QueueCommand, QueueCommands, TransferToken
    from slatemq.queue_file_store import TextQueueStore
    from slatemq.queue_models import (
        Backoff,
        BackoffKind,
        Counts,
        DeletedQueue,
        PriorityCounts,
        Quarantine,
        Queue,
        Replay,
        ReplayRange,
    )
    from slatemq.queue_store import MemoryQueue, QueueStore, QueueView
    from slatemq.redrives import Redrive, RedriveState
    from slatemq.ref_set import ItemLease, RefSet, RefToken
    from slatemq.settling import DropLetter, NoteLetter, RedriveLetter, ReplaceLetter
    from slatemq.tasks import Task, TaskState
    from slatemq.watching import DelayedWatch

__all__ = [
    "Archived",
    "ArchivedLetter",
    "ArchivedOutcome",
    "Attempt",
    "Backoff",
    "BackoffKind",
    "Batch",
    "BatchConsumer",
    "BatchSettings",
    "Client",
    "CommandContext",
    "CommandResult",
    "Complete",
    "Consumer",
    "Counts",
    "DelayedWatch",
    "DeletedQueue",
    "DropLetter",
    "Entry",
    "EntryPage",
    "EntryState",
    "EntryView",
    "EventsStatus",
    "Explanation",
    "Extend",
    "Fail",
    "ItemLease",
    "JobProgress",
    "JobRun",
    "JobRunState",
    "MemoryQueue",
    "MessageLease",
    "MessageRefs",
    "MessageToken",
    "MessageView",
    "NoteLetter",
    "OutgoingMessage",
    "PriorityCounts",
    "Published",
    "Push",
    "Quarantine",
    "Queue",
    "QueueCommand",
    "QueueCommands",
    "QueueStore",
    "QueueView",
    "Received",
    "Redrive",
    "RedriveLetter",
    "RedriveState",
    "RefSet",
    "RefToken",
    "Release",
    "ReplaceLetter",
    "Replay",
    "ReplayRange",
    "RouteStatus",
    "SearchProgress",
    "ServiceStatus",
    "Status",
    "StoredMessage",
    "Task",
    "TaskState",
    "TextQueueStore",
    "Topology",
    "Transfer",
    "TransferToken",
    "connect",
]

_HOMES = {
    "slatemq.archived": ["ArchivedLetter", "ArchivedOutcome"],
    "slatemq.batches": ["BatchConsumer"],
    "slatemq.client": ["Client", "connect"],
    "slatemq.commands": [
        "CommandContext",
        "CommandResult",
        "Complete",
        "Extend",
        "Fail",
        "Push",
        "Release",
        "Transfer",
    ],
    "slatemq.consumer": ["Consumer"],
    "slatemq.delivered": ["Batch", "Received"],
    "slatemq.entry_models": [
        "Archived",
        "Attempt",
        "Entry",
        "EntryPage",
        "EntryState",
        "EntryView",
        "SearchProgress",
        "StoredMessage",
    ],
    "slatemq.events_status": ["EventsStatus"],
    "slatemq.janitor": ["JobProgress", "JobRun", "JobRunState"],
    "slatemq.published": ["Published"],
    "slatemq.queue_models": [
        "Backoff",
        "BackoffKind",
        "Counts",
        "DeletedQueue",
        "PriorityCounts",
        "Queue",
        "Quarantine",
        "Replay",
        "ReplayRange",
    ],
    "slatemq.message_refs": ["MessageLease", "MessageRefs", "MessageToken", "MessageView"],
    "slatemq.queue_commands": ["QueueCommand", "QueueCommands", "TransferToken"],
    "slatemq.queue_file_store": ["TextQueueStore"],
    "slatemq.queue_store": ["MemoryQueue", "QueueStore", "QueueView"],
    "slatemq.ref_set": ["ItemLease", "RefSet", "RefToken"],
    "slatemq.redrives": ["Redrive", "RedriveState"],
    "slatemq.settling": ["DropLetter", "NoteLetter", "RedriveLetter", "ReplaceLetter"],
    "slatemq.tasks": ["Task", "TaskState"],
    "slatemq.watching": ["DelayedWatch"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


_MODULES = ("codecs", "errors", "events", "sync")
"""The modules that users need beside the names of this one."""


def __dir__() -> list[str]:
    own = ("__all__", "__doc__", "__file__", "__name__", "__path__", "__version__")
    return sorted({*__all__, *_MODULES, *own})


def __getattr__(name: str) -> Any:
    # Loaded when asked for: the services import slatemq.errors, and need no client for that.
    if name in _MODULES:
        return import_module(f"slatemq.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF.get(name, "slatemq.models")), name)
