"""SlateMQ: a durable message queue whose only durable state is an object store.

    async with slatemq.connect("127.0.0.1:7420") as client:
        await client.publish(b"hello", {"queue": "greetings"})

`slatemq.sync` has the same for programs without asyncio, `slatemq.errors` every error, `slatemq.v1`
the generated protobuf messages and stubs.
"""

from __future__ import annotations

from importlib import import_module

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
    from slatemq.janitor import JobProgress, JobRun, JobRunState
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
    from slatemq.queue_models import (
        Backoff,
        BackoffKind,
        Counts,
        DeletedQueue,
        PriorityCounts,
        Queue,
        Replay,
        ReplayRange,
    )
    from slatemq.queue_view import (
        ItemLease,
        QueueCommand,
        QueueCommands,
        QueueView,
        RefSet,
        RefToken,
        TransferToken,
    )
    from slatemq.redrives import Redrive, RedriveState
    from slatemq.settling import DropLetter, NoteLetter, RedriveLetter, ReplaceLetter
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
    "Explanation",
    "Extend",
    "Fail",
    "ItemLease",
    "JobProgress",
    "JobRun",
    "JobRunState",
    "NoteLetter",
    "OutgoingMessage",
    "PriorityCounts",
    "Published",
    "Push",
    "Queue",
    "QueueCommand",
    "QueueCommands",
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
    "slatemq.janitor": ["JobProgress", "JobRun", "JobRunState"],
    "slatemq.published": ["Published"],
    "slatemq.queue_models": [
        "Backoff",
        "BackoffKind",
        "Counts",
        "DeletedQueue",
        "PriorityCounts",
        "Queue",
        "Replay",
        "ReplayRange",
    ],
    "slatemq.queue_view": [
        "ItemLease",
        "QueueCommand",
        "QueueCommands",
        "QueueView",
        "RefSet",
        "RefToken",
        "TransferToken",
    ],
    "slatemq.redrives": ["Redrive", "RedriveState"],
    "slatemq.settling": ["DropLetter", "NoteLetter", "RedriveLetter", "ReplaceLetter"],
    "slatemq.watching": ["DelayedWatch"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    # Loaded when asked for: the services import slatemq.errors, and need no client for that.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF.get(name, "slatemq.models")), name)
