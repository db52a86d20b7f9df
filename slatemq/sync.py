"""The client for programs without asyncio: the same code, on an event loop in a thread of its own.

As in::

    with slatemq.sync.connect("127.0.0.1:7420") as client:
        client.publish(b"hello", {"queue": "greetings"})
        with client.consume("greetings") as messages:
            for message in messages:
                with message:
                    work(message.payload)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar, overload

from slatemq import client as asynchronous
from slatemq._admin import watching
from slatemq._admin.entry_models import Entry
from slatemq._commands import command_calls, message_refs
from slatemq._commands.command_calls import QueueCommand
from slatemq._commands.message_refs import MessageToken
from slatemq._consume import batches as batching
from slatemq._consume import consumer as consuming
from slatemq._consume import delivered
from slatemq._consume.commands import Command
from slatemq._rpc.blocking import Face, Loop, StreamFace, iterator_of, list_of, maker_of, method_of
from slatemq._rpc.forks import check_can_connect
from slatemq._rpc.outages import Outage
from slatemq.errors import Unavailable
from slatemq.models import Duration, Time

P = ParamSpec("P")
T = TypeVar("T")

__all__ = [
    "Batch",
    "BatchConsumer",
    "Consumer",
    "DelayedWatch",
    "ItemLease",
    "QueueCommands",
    "QueueView",
    "Received",
    "RefSet",
    "SyncClient",
    "TransferToken",
    "connect",
]


class Received(Face[delivered.Received], delivered.ClaimedMessage):
    """A claimed message; see slatemq.Received."""

    def __reduce__(self) -> NoReturn:
        self._inner.__reduce__()

    ack = method_of(delivered.Received.ack)
    nack = method_of(delivered.Received.nack)
    release = method_of(delivered.Received.release)
    extend = method_of(delivered.Received.extend)
    fail = method_of(delivered.Received.fail)

    def __init__(self, loop: Loop, inner: delivered.Received) -> None:
        # Without a call of the faces' own: the client makes thousands of these.
        self._loop, self._inner = loop, inner
        self._run, self._place, self._origin = inner._run, inner._place, inner._origin
        self.lease_token, self._payload = inner.lease_token, inner._payload

    @property
    def lost(self) -> bool:
        """Whether its lease was lost: another consumer may have the message."""
        return self._inner.lost

    @property
    def finished(self) -> bool:
        """Whether it was acked or given back through this object."""
        return self._inner.finished

    def settled(self) -> None:
        """Ends keeping its lease: it was finished by `execute`."""
        self._inner.settled()

    def __enter__(self) -> Received:
        self._inner.begin()  # Here, not on the loop: a span is current in the thread that works.
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self._loop.run(lambda: self._inner.leave(error))
        finally:
            self._inner.end(error)


class Batch(Face[batching.Batch], Sequence[Received]):
    """Messages that were claimed together; see slatemq.Batch."""

    ack_all = method_of(batching.Batch.ack_all)
    nack_all = method_of(batching.Batch.nack_all)
    release_all = method_of(batching.Batch.release_all)

    def __init__(self, loop: Loop, inner: batching.Batch) -> None:
        super().__init__(loop, inner)
        self._messages = [Received(loop, message) for message in inner]

    def __len__(self) -> int:
        return len(self._messages)

    @overload
    def __getitem__(self, place: int) -> Received: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Received]: ...
    def __getitem__(self, place: int | slice) -> Received | Sequence[Received]:
        return self._messages[place]

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._loop.run(lambda: self._inner.__aexit__(None, error, None))


class Consumer(StreamFace[consuming.Consumer, Received]):
    """Messages of a queue as an iterator and context manager; see slatemq.Consumer."""

    close = method_of(consuming.Consumer.close)

    @property
    def paused(self) -> bool:
        """Whether the queue is paused, as of the last try; iterating waits for its end."""
        return self._inner.paused

    @property
    def outage(self) -> Outage | None:
        """See slatemq.Consumer.outage; for another thread than the one that iterates."""
        return self._inner.outage

    def take(self) -> Received:
        """The next message; waits for it."""
        taken = self._loop.run(lambda: anext(self._inner), self._inner.requeue)
        return Received(self._loop, taken)


class BatchConsumer(StreamFace[batching.BatchConsumer, Batch]):
    """Batches of a queue as an iterator and context manager; see slatemq.BatchConsumer."""

    close = method_of(batching.BatchConsumer.close)

    @property
    def outage(self) -> Outage | None:
        """See slatemq.BatchConsumer.outage; for another thread than the one that iterates."""
        return self._inner.outage

    def take(self) -> Batch:
        """The next batch; waits for it."""
        taken = self._loop.run(lambda: anext(self._inner), self._inner.requeue)
        return Batch(self._loop, taken)


class ItemLease(Face[message_refs.MessageLease[T]], Generic[T]):
    """A lease on an item, as a context manager; see slatemq.MessageLease."""

    @property
    def item(self) -> T:
        """The item. Raises what its codec raises."""
        return self._inner.item

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers of its message."""
        return self._inner.headers

    @property
    def lost(self) -> bool:
        """Whether the lease was lost: another consumer may have the item."""
        return self._inner.lost

    def __enter__(self) -> ItemLease[T]:
        self._loop.run(self._inner.__aenter__)
        return self

    def __exit__(self, *_: object) -> None:
        async def end() -> None:
            self._inner.end()

        self._loop.run(end)


class RefSet(Face[message_refs.MessageRefs[T]], Generic[T]):
    """Turns tokens into leases on items; see slatemq.MessageRefs."""

    def lease(self, token: MessageToken[T]) -> ItemLease[T]:
        """A lease on the token's item; see slatemq.MessageRefs.lease."""
        return ItemLease(self._loop, self._inner.lease(token))

    def extend(self, token: MessageToken[T], length: Duration | None = None) -> int:
        """Sets the end of a token's lease; see slatemq.MessageRefs.extend."""
        return self._loop.run(lambda: self._inner.extend(token, length))


class QueueView(Face[message_refs.MessageView[T]], Generic[T]):
    """The items of a queue, one by one, without waiting; see slatemq.MessageView."""

    def __init__(self, loop: Loop, inner: message_refs.MessageView[T]) -> None:
        super().__init__(loop, inner)
        self.refs = RefSet(loop, inner.refs)

    @property
    def queue_id(self) -> str:
        """The queue."""
        return self._inner.queue_id

    def __len__(self) -> int:
        """How many items can be claimed now."""
        return self._loop.run(self._inner.len)

    def __bool__(self) -> bool:
        return True  # A view of an empty queue is still a view, and asking costs a call.

    def try_next(self) -> MessageToken[T] | None:
        """The token of the next item, or None; see slatemq.MessageView.try_next."""
        return self._loop.run(self._inner.try_next)


class TransferToken(Face[command_calls.TransferToken[T]], Generic[T]):
    """Items that are complete, released to go elsewhere; see slatemq.TransferToken."""

    @property
    def released(self) -> bool:
        """Whether it can still be used."""
        return self._inner.released

    def __len__(self) -> int:
        return len(self._inner)

    def commands(self) -> Sequence[Command]:
        """Uses it up for commands that complete the items."""
        return self._inner.commands()

    def commit(self) -> None:
        """Completes the items alone; see slatemq.TransferToken.commit."""
        self._loop.run(self._inner.commit)


class QueueCommands(Face[command_calls.QueueCommands[T]], Generic[T]):
    """Changes of a queue that wait to be executed together; see slatemq.QueueCommands."""

    def complete(self, tokens: Sequence[MessageToken[T]]) -> TransferToken[T]:
        """One released token for these items; see slatemq.QueueCommands.complete."""
        return TransferToken(self._loop, self._inner.complete(tokens))

    def push(
        self, token: TransferToken[T], *, priority: int | None = None, delay: Duration = 0
    ) -> QueueCommand:
        """Moves the items of a released token into this queue; see slatemq.QueueCommands.push."""
        inner: Any = getattr(token, "_inner", token)  # Anything else is refused by name.
        return self._inner.push(inner, priority=priority, delay=delay)

    def push_item(
        self,
        item: T,
        headers: Mapping[str, str] | None = None,
        *,
        retention: Duration | None = None,
        delay: Duration | None = None,
        visible_at: Time | None = None,
    ) -> QueueCommand:
        """Puts a new item into this queue; see slatemq.QueueCommands.push_item."""
        return self._inner.push_item(
            item, headers, retention=retention, delay=delay, visible_at=visible_at
        )


class DelayedWatch(StreamFace[watching.DelayedWatch, Entry]):
    """Delayed messages as an iterator and context manager; see slatemq.DelayedWatch."""

    close = method_of(watching.DelayedWatch.close)

    @property
    def outage(self) -> Outage | None:
        """See slatemq.DelayedWatch.outage; for another thread than the one that iterates."""
        return self._inner.outage

    @property
    def position(self) -> str:
        """Where a later watch goes on: behind the last answer that was taken in whole."""
        return self._inner.position

    def take(self) -> Entry:
        """The next one; waits for it."""
        return self._loop.run(lambda: anext(self._inner))


def _release(messages: list[delivered.Received]) -> None:
    for message in messages:
        message.release_soon()


class SyncClient(Face[asynchronous.Client]):
    """See slatemq.Client: the same methods but `process`, each waiting for its result.

    For any thread.
    """

    publish = method_of(asynchronous.Client.publish)
    publish_many = method_of(asynchronous.Client.publish_many)
    publish_batch = method_of(asynchronous.Client.publish_batch)
    ack = method_of(asynchronous.Client.ack)
    nack = method_of(asynchronous.Client.nack)
    extend = method_of(asynchronous.Client.extend)
    create_queue = method_of(asynchronous.Client.create_queue)
    get_queue = method_of(asynchronous.Client.get_queue)
    update_queue = method_of(asynchronous.Client.update_queue)
    delete_queue = method_of(asynchronous.Client.delete_queue)
    explain = method_of(asynchronous.Client.explain)
    topology = method_of(asynchronous.Client.topology)
    status = method_of(asynchronous.Client.status)
    pause_queue = method_of(asynchronous.Client.pause_queue)
    resume_queue = method_of(asynchronous.Client.resume_queue)
    lift_quarantine = method_of(asynchronous.Client.lift_quarantine)
    shards = method_of(asynchronous.Client.shards)
    drain_shard = method_of(asynchronous.Client.drain_shard)
    remove_shard = method_of(asynchronous.Client.remove_shard)
    move_queue = method_of(asynchronous.Client.move_queue)
    queue_moves = method_of(asynchronous.Client.queue_moves)
    purge_queue = method_of(asynchronous.Client.purge_queue)
    entry_page = method_of(asynchronous.Client.entry_page)
    get_entry = method_of(asynchronous.Client.get_entry)
    cancel_entry = method_of(asynchronous.Client.cancel_entry)
    reschedule_entry = method_of(asynchronous.Client.reschedule_entry)
    edit_message = method_of(asynchronous.Client.edit_message)
    read_messages = method_of(asynchronous.Client.read_messages)
    start_redrive = method_of(asynchronous.Client.start_redrive)
    get_redrive = method_of(asynchronous.Client.get_redrive)
    cancel_redrive = method_of(asynchronous.Client.cancel_redrive)
    resume_redrive = method_of(asynchronous.Client.resume_redrive)
    wait_redrive = method_of(asynchronous.Client.wait_redrive)
    settle_dead_letters = method_of(asynchronous.Client.settle_dead_letters)
    redrive_archived = method_of(asynchronous.Client.redrive_archived)
    drop_archived = method_of(asynchronous.Client.drop_archived)
    execute = method_of(asynchronous.Client.execute)
    outbox_lines = iterator_of(asynchronous.Client.outbox_lines)
    refused_pushes = iterator_of(asynchronous.Client.refused_pushes)
    get_refused_push = method_of(asynchronous.Client.get_refused_push)
    retry_refused_push = method_of(asynchronous.Client.retry_refused_push)
    discard_refused_push = method_of(asynchronous.Client.discard_refused_push)
    resume_outbox = method_of(asynchronous.Client.resume_outbox)
    get_task = method_of(asynchronous.Client.get_task)
    wait_task = method_of(asynchronous.Client.wait_task)
    retry_failed_tasks = method_of(asynchronous.Client.retry_failed_tasks)
    events_status = method_of(asynchronous.Client.events_status)
    get_instance = method_of(asynchronous.Client.get_instance)
    update_instance = method_of(asynchronous.Client.update_instance)
    check_access = method_of(asynchronous.Client.check_access)
    get_caller = method_of(asynchronous.Client.get_caller)
    get_callers = method_of(asynchronous.Client.get_callers)
    examine = method_of(asynchronous.Client.examine)
    run_job = method_of(asynchronous.Client.run_job)
    get_job_run = method_of(asynchronous.Client.get_job_run)
    cancel_job_run = method_of(asynchronous.Client.cancel_job_run)
    wait_job_run = method_of(asynchronous.Client.wait_job_run)
    read_report = method_of(asynchronous.Client.read_report)
    list_queues = iterator_of(asynchronous.Client.list_queues)
    watch_queues = iterator_of(asynchronous.Client.watch_queues)
    list_entries = iterator_of(asynchronous.Client.list_entries)
    find_message = iterator_of(asynchronous.Client.find_message)
    read_archived = iterator_of(asynchronous.Client.read_archived)
    list_redrives = iterator_of(asynchronous.Client.list_redrives)
    failed_tasks = iterator_of(asynchronous.Client.failed_tasks)
    pending_tasks = iterator_of(asynchronous.Client.pending_tasks)
    list_job_runs = iterator_of(asynchronous.Client.list_job_runs)
    watch_job_run = iterator_of(asynchronous.Client.watch_job_run)
    watch_delayed = maker_of(asynchronous.Client.watch_delayed, DelayedWatch)
    consume = maker_of(asynchronous.Client.consume, Consumer)
    consume_batches = maker_of(asynchronous.Client.consume_batches, BatchConsumer)
    claim = list_of(asynchronous.Client.claim, Received, _release)
    queue_view = maker_of(asynchronous.Client.queue_view, QueueView)
    queue_commands = maker_of(asynchronous.Client.queue_commands, QueueCommands)

    def close(self) -> None:
        """See slatemq.Client.close; again does nothing."""
        try:
            self._loop.run(self._inner.close)
        except Unavailable as error:
            if error.reason != "CLIENT_CLOSED":
                raise
        finally:
            self._loop.close()

    def __enter__(self) -> SyncClient:
        try:
            self._loop.run(self._inner.__aenter__)
        except BaseException:
            self._loop.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # A child that was forked in the block leaves it, too, as by sys.exit: not its to close.
        if not self._loop.is_inherited:
            self.close()


def _connect_of(
    connect: Callable[P, asynchronous.Client],
) -> Callable[P, SyncClient]:
    """`connect`, but of a synchronous client."""

    @wraps(connect)
    def connected(*args: P.args, **kwargs: P.kwargs) -> SyncClient:
        check_can_connect()
        loop = Loop()

        async def make() -> asynchronous.Client:
            return connect(*args, **kwargs)

        try:
            return SyncClient(loop, loop.run(make))
        except BaseException:
            loop.close()
            raise

    return connected


connect = _connect_of(asynchronous.connect)
"""A synchronous client; see slatemq.connect. Use it as a context manager."""
