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
    from slatemq._admin.archived import ArchivedDeadLetter, ArchivedOutcome
    from slatemq._admin.entry_models import (
        Archived,
        Attempt,
        Entry,
        EntryPage,
        EntryState,
        EntryView,
        SearchProgress,
        StoredMessage,
    )
    from slatemq._admin.events_status import EventsStatus
    from slatemq._admin.instance import Instance
    from slatemq._admin.instance_status import Status
    from slatemq._admin.janitor import JobProgress, JobRun, JobRunState
    from slatemq._admin.queue_models import (
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
    from slatemq._admin.redrives import Redrive, RedriveState
    from slatemq._admin.settling import (
        DropDeadLetter,
        NoteDeadLetter,
        RedriveDeadLetter,
        ReplaceDeadLetter,
    )
    from slatemq._admin.tasks import Task, TaskState
    from slatemq._admin.watching import DelayedWatch
    from slatemq._commands.message_refs import MessageLease, MessageRefs, MessageToken, MessageView
    from slatemq._commands.queue_commands import QueueCommand, QueueCommands, TransferToken
    from slatemq._commands.queue_file_store import TextQueueStore
    from slatemq._commands.queue_store import MemoryQueue, QueueStore, QueueView
    from slatemq._commands.ref_set import ItemLease, RefSet, RefToken
    from slatemq._consume.batches import Batch, BatchConsumer
    from slatemq._consume.commands import (
        CommandContext,
        CommandResult,
        Complete,
        Extend,
        Fail,
        Push,
        Release,
        Transfer,
    )
    from slatemq._consume.consumer import Consumer
    from slatemq._consume.delivered import Received
    from slatemq._publish.published import Published
    from slatemq.client import Client, connect
    from slatemq.models import (
        BatchSettings,
        Explanation,
        OutgoingMessage,
        RouteStatus,
        ServiceStatus,
        Topology,
    )

__all__ = [
    "Archived",
    "ArchivedDeadLetter",
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
    "DropDeadLetter",
    "Entry",
    "EntryPage",
    "EntryState",
    "EntryView",
    "EventsStatus",
    "Explanation",
    "Extend",
    "Fail",
    "Instance",
    "ItemLease",
    "JobProgress",
    "JobRun",
    "JobRunState",
    "MemoryQueue",
    "MessageLease",
    "MessageRefs",
    "MessageToken",
    "MessageView",
    "NoteDeadLetter",
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
    "RedriveDeadLetter",
    "RedriveState",
    "RefSet",
    "RefToken",
    "Release",
    "ReplaceDeadLetter",
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
    "slatemq._admin.archived": ["ArchivedDeadLetter", "ArchivedOutcome"],
    "slatemq._consume.batches": ["Batch", "BatchConsumer"],
    "slatemq.client": ["Client", "connect"],
    "slatemq._consume.commands": [
        "CommandContext",
        "CommandResult",
        "Complete",
        "Extend",
        "Fail",
        "Push",
        "Release",
        "Transfer",
    ],
    "slatemq._consume.consumer": ["Consumer"],
    "slatemq._consume.delivered": ["Received"],
    "slatemq._admin.entry_models": [
        "Archived",
        "Attempt",
        "Entry",
        "EntryPage",
        "EntryState",
        "EntryView",
        "SearchProgress",
        "StoredMessage",
    ],
    "slatemq._admin.events_status": ["EventsStatus"],
    "slatemq._admin.instance": ["Instance"],
    "slatemq._admin.instance_status": ["Status"],
    "slatemq._admin.janitor": ["JobProgress", "JobRun", "JobRunState"],
    "slatemq._publish.published": ["Published"],
    "slatemq._admin.queue_models": [
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
    "slatemq._commands.message_refs": [
        "MessageLease",
        "MessageRefs",
        "MessageToken",
        "MessageView",
    ],
    "slatemq._commands.queue_commands": ["QueueCommand", "QueueCommands", "TransferToken"],
    "slatemq._commands.queue_file_store": ["TextQueueStore"],
    "slatemq._commands.queue_store": ["MemoryQueue", "QueueStore", "QueueView"],
    "slatemq._commands.ref_set": ["ItemLease", "RefSet", "RefToken"],
    "slatemq._admin.redrives": ["Redrive", "RedriveState"],
    "slatemq._admin.settling": [
        "DropDeadLetter",
        "NoteDeadLetter",
        "RedriveDeadLetter",
        "ReplaceDeadLetter",
    ],
    "slatemq._admin.tasks": ["Task", "TaskState"],
    "slatemq._admin.watching": ["DelayedWatch"],
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
