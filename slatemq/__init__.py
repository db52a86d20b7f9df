"""SlateMQ: a durable message queue whose only durable state is an object store.

    async with slatemq.connect("127.0.0.1:7420") as client:
        await client.publish(b"hello", {"queue": "greetings"})

`slatemq.sync` has the same for programs without asyncio, `slatemq.errors` every error, `slatemq.v1`
the generated protobuf messages and stubs.

Its files, in reading order; a file imports only files above it:

`errors`        every error that a caller may see
`otel`          spans and metrics by OpenTelemetry's conventions, where the program asks for them
`v1`            the generated protobuf messages and gRPC stubs
`textqueue`     queue files that people read and edit, without a server
`codecs`        how items become payloads and come back
`variables`     the environment variables, and a warning about those that are not known
`dedupe_shards` which ingest shard a dedupe key belongs to
`_counts`       numbers with their nouns, as people read them
`_cancelling`   ending tasks of the event loop, and whose cancellation an error is
`_grouping`     items in groups that are not too large
`_byte_budget`  bounds on bytes in memory that many share
`_patterns`     patterns of names, as a policy has them
`_tokens`       static tokens: how they are made, and how they are hashed
`_secrets`      secrets: checked, read from their files, and left out of logs and responses
`_checks`       checks of arguments before they are sent
`_file_status`  files that are read again when they have changed
`_requests`     messages of the API from checked arguments, and plain values from messages
`encryption`    payloads that the server cannot read
`credentials`   who a client is, and how its connections are protected
`models`        the client's arguments and results: plain frozen values
`_clocks`       how far the clocks of two machines differ
`events`        events: the envelope, the catalogue of types, notifications of S3 stores
`_rpc`          finding the processes of an instance, and calling them
`_consume`      claiming messages, keeping their leases, settling them
`_publish`      publishing
`_admin`        queues, entries, dead letters, runs and tasks: the calls of people and tools
`_commands`     commands that take effect together, and queues as stores of items
`client`        the client
`sync`          the client for programs without asyncio
`cli`           the command `slatemq`
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
    from slatemq._admin.examining import Caller, CertificateExpiry, Examination
    from slatemq._admin.instance import EventsStatus, Instance, Status
    from slatemq._admin.janitor import JobProgress, JobRun, JobRunState
    from slatemq._admin.queue_models import (
        Backoff,
        BackoffKind,
        Counts,
        DeletedQueue,
        PriorityCounts,
        Quarantine,
        Queue,
        QueueDraft,
        Replay,
        ReplayRange,
        Totals,
    )
    from slatemq._admin.redrives import Redrive, RedriveState
    from slatemq._admin.settling import (
        ArchivedDeadLetter,
        ArchivedOutcome,
        DropDeadLetter,
        NoteDeadLetter,
        RedriveDeadLetter,
        ReplaceDeadLetter,
    )
    from slatemq._admin.tasks import Task, TaskState
    from slatemq._admin.watching import DelayedWatch
    from slatemq._commands.command_calls import QueueCommand, QueueCommands, TransferToken
    from slatemq._commands.message_refs import MessageLease, MessageRefs, MessageToken, MessageView
    from slatemq._commands.queue_file_store import TextQueueStore
    from slatemq._commands.ref_set import (
        ItemLease,
        MemoryQueue,
        QueueStore,
        QueueView,
        RefSet,
        RefToken,
    )
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
    from slatemq.credentials import Credentials
    from slatemq.models import (
        AccessCheck,
        AccessRule,
        BatchSettings,
        Explanation,
        OutgoingMessage,
        RouteStatus,
        ServiceStatus,
        Topology,
    )

__all__ = [
    "AccessCheck",
    "AccessRule",
    "Archived",
    "ArchivedDeadLetter",
    "ArchivedOutcome",
    "Attempt",
    "Backoff",
    "BackoffKind",
    "Batch",
    "BatchConsumer",
    "BatchSettings",
    "Caller",
    "CertificateExpiry",
    "Client",
    "CommandContext",
    "CommandResult",
    "Complete",
    "Consumer",
    "Counts",
    "Credentials",
    "DelayedWatch",
    "DeletedQueue",
    "DropDeadLetter",
    "Entry",
    "EntryPage",
    "EntryState",
    "EntryView",
    "EventsStatus",
    "Examination",
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
    "QueueDraft",
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
    "Totals",
    "Transfer",
    "TransferToken",
    "connect",
]

_HOMES = (
    "models",
    "client",
    "credentials",
    "_admin.entry_models",
    "_admin.examining",
    "_admin.instance",
    "_admin.janitor",
    "_admin.queue_models",
    "_admin.redrives",
    "_admin.settling",
    "_admin.tasks",
    "_admin.watching",
    "_commands.ref_set",
    "_commands.message_refs",
    "_commands.command_calls",
    "_consume.batches",
    "_consume.commands",
    "_consume.consumer",
    "_consume.delivered",
    "_publish.published",
    "_commands.queue_file_store",
)
"""The modules of the names. The client loads all that follow it but the last, which few need."""

_MODULES = ("codecs", "encryption", "errors", "events", "sync")
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
    for home in _HOMES:
        found = getattr(import_module(f"slatemq.{home}"), name, None)
        if found is not None:
            break
    return found
