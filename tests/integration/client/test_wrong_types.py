"""Each argument of each public call gets values of wrong types; what is refused is named.

The calls are found by their signatures, so that a new one is tested too. They go to a server that
refuses whatever reaches it. The synchronous calls are these, run on another thread.
"""

from __future__ import annotations

import asyncio
import inspect
import types
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import grpc
import pytest

import slatemq
import slatemq.sync
from slatemq import codecs
from slatemq._admin.queue_models import QueueSettings
from slatemq._admin.task_ids import TaskIds
from slatemq._consume.delivered import Claimed, Received, received
from slatemq._requests import message_of
from slatemq.encryption import KeyRing
from slatemq.errors import FailedPrecondition, InvalidArgument, SlateMQError
from slatemq.textqueue import TextQueue
from slatemq.v1 import consumer_pb2, entry_pb2, queue_pb2
from tests.integration.client.peers import Directory, refuse

LEASE = "0-abc"

SURROGATE = "\ud800"

JSON = codecs.JSON

TEXT: Any = slatemq.OutgoingMessage("x")  # type: ignore[arg-type]

VALUES: list[Any] = [
    None,
    False,
    True,
    0,
    5,
    -1,
    1 << 63,
    10**30,
    10**400,
    1.5,
    float("nan"),
    float("inf"),
    "x",
    SURROGATE,
    "",
    b"",
    b"x",
    bytearray(b"x"),
    [],
    {},
    [1],
    ["x"],
    [SURROGATE],
    [object()],
    {1: 2},
    {"x": "y"},
    {"x": SURROGATE},
    {"x"},
    object(),
    datetime(2026, 1, 1),
    timedelta(days=10**8),
    timedelta(seconds=-1),
    lambda: 1,
    int,
]
"""Of each kind at least one, and of numbers and texts those that have no wire form."""


@dataclass
class Refusing(grpc.GenericRpcHandler):
    """Every service of an instance with one shard of each; it refuses what is not about places."""

    directory: Directory = field(default_factory=Directory)

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        known = {
            "GetTopology": self.directory.response,
            "LocateQueue": queue_pb2.LocateQueueResponse(broker_shards=[0]),
        }
        response = known.get(details.method.rpartition("/")[2])

        async def answer(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            await anext(aiter(requests), None)
            if response is None:
                await refuse(context, FailedPrecondition("REACHED", "it has come to the server"))
            else:
                yield response.SerializeToString()

        return grpc.stream_stream_rpc_method_handler(answer)


@pytest.fixture
async def endpoint() -> AsyncIterator[str]:
    refusing = Refusing()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((refusing,))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    for service in ("ingests", "brokers", "routers", "janitors"):
        refusing.directory.put(service, 0, address)
    await server.start()
    yield address
    await server.stop(None)


# --- What fits ----------------------------------------------------------------


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is one that this annotation permits, and that has a wire form."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, typing.TypeVar):
        return True
    if hint in (None, type(None)):
        return value is None
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in arguments)
    if origin is typing.Literal:
        return any(value is one or (type(value) is str and value == one) for one in arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(
            fits(one, kind)
            for pair in value.items()
            for one, kind in zip(pair, arguments, strict=True)
        )
    if origin in ITERABLES:
        may = isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray | type)
        return may and all(fits(one, arguments[0]) for one in value)
    if origin is Callable or origin is typing.get_origin(typing.Callable[..., Any]):
        return callable(value)
    kind = origin or hint
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and value == value
    if kind is int:
        return type(value) is int and -1 << 63 <= value < 1 << 63
    if kind is str:
        return isinstance(value, str) and value != SURROGATE
    if kind is datetime:
        return isinstance(value, datetime) and value.tzinfo is not None
    if getattr(kind, "_is_protocol", False):
        return all(hasattr(value, name) for name in vars(kind) if not name.startswith("_"))
    return isinstance(value, kind)


ITERABLES = {typing.get_origin(one) for one in (Iterable[int], typing.Sequence[int])}


@pytest.mark.parametrize(
    ("hint", "fitting", "others"),
    [
        (str, ["x"], [5, SURROGATE, b"x", None]),
        (int, [5], [True, 1.5, 1 << 63]),
        (float | timedelta | None, [5, 1.5, None, timedelta(1)], [float("nan"), True, "x"]),
        (Iterable[str], [["x"], {"x"}, []], ["x", b"x", [1], 5]),
        (Mapping[str, str], [{"x": "y"}, {}], [{1: 2}, [], None]),
        (typing.Literal["now", "beginning"], ["now"], ["x", 5]),
        (codecs.Codec[int], [JSON], ["x", 5]),
        (Callable[[int], None], [print], [5]),
    ],
)
def test_a_value_fits_where_it_is_of_the_annotated_type(
    hint: Any, fitting: list[Any], others: list[Any]
) -> None:
    assert [one for one in fitting if not fits(one, hint)] == []
    assert [one for one in others if fits(one, hint)] == []


# --- The calls ----------------------------------------------------------------


async def handle(_: Any) -> None:
    """A handler of messages."""


ARCHIVED = slatemq.Entry(
    "q/1/f1", "q", 1, slatemq.EntryState.ARCHIVED, archived=slatemq.Archived("r", 1, 1)
)

GIVEN: Mapping[str, Any] = {
    "queue_id": "q",
    "handle": "q/1/f1",
    "payload": b"",
    "headers": {},
    "messages": [b""],
    "message_id": 1,
    "message_ids": [1],
    "lease_tokens": [LEASE],
    "lease": LEASE,
    "redrive": "0-1",
    "run": "r",
    "job": "done",
    "state": "failed",
    "push": "0-1-1",
    "task_id": TaskIds(0).make(1),
    "broker_shard": 0,
    "service": "broker",
    "shard": 0,
    "ingest_shard": 0,
    "handler": handle,
    "codec": JSON,
    "principal": "p",
    "verb": "publish",
    "reason": "r",
    "note": "n",
    "initial": 1,
    "item": 1,
    "item_id": 1,
    "settings": {"replay_window_s": 3600},
    "endpoint": "127.0.0.1:1",
}
"""Values of parameters that must be given."""

NAMES: Mapping[str, Any] = {"KeyRing": KeyRing}
"""What annotations name that is imported for type checkers alone."""

Make = Callable[[slatemq.Client], Callable[..., Any]]


@dataclass(frozen=True)
class Call:
    """A call whose parameters are tried.

    Attributes:
        signature: What has the parameters.
        make: What takes them by name, for a client.
        about: Where an error's field has the name of a parameter.
        given: Values for parameters that must be given, in place of `GIVEN`.
        left_out: Parameters that may be anything.
        may_be_none: Parameters that take None, although their annotation does not say so.
        instead: Parameters that an error may name in place of these.
    """

    signature: Any
    make: Make
    about: str = "{}"
    given: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    may_be_none: tuple[str, ...] = ()
    instead: Mapping[str, str] = field(default_factory=dict)


async def run(call: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Calls it, and takes the first item of what it iterates over."""
    async with asyncio.timeout(60):
        found = call(**arguments)
        if isinstance(found, Awaitable):
            found = await found
        for error in found if isinstance(found, list) else ():
            if isinstance(error, SlateMQError):
                raise error
        if hasattr(found, "__anext__"):
            await anext(found, None)
        if hasattr(found, "close"):
            closing = found.close()
            if isinstance(closing, Awaitable):
                await closing


def parameters_of(signature: Any) -> dict[str, tuple[Any, bool]]:
    """The annotation of each parameter, and whether it must be given; settings one by one."""
    is_plain = isinstance(signature, type) and not issubclass(signature, tuple)
    annotated = signature.__init__ if is_plain else signature
    hints = typing.get_type_hints(annotated, localns=NAMES)
    found: dict[str, tuple[Any, bool]] = {}
    for name, one in inspect.signature(signature).parameters.items():
        if one.kind is one.VAR_KEYWORD:
            settings = typing.get_type_hints(QueueSettings, localns=NAMES)
            found |= {setting: (hint, False) for setting, hint in settings.items()}
        elif name != "self":
            found[name] = hints[name], one.default is one.empty
    return found


async def faults_of(call: Call, client: slatemq.Client) -> list[str]:
    """What is wrong about the outcomes: of each parameter with each value, the rest as given."""
    parameters = parameters_of(call.signature)
    given = {
        name: call.given.get(name, GIVEN.get(name))
        for name, (_, must_be_given) in parameters.items()
        if name in call.given or (must_be_given and name in GIVEN)
    }
    faults = []
    for name, (hint, _) in parameters.items():
        names = {name, call.about.format(name), call.instead.get(name, name)}
        for value in VALUES if name not in call.left_out else ():
            is_fitting = fits(value, hint) or (value is None and name in call.may_be_none)
            outcome: Exception | None = None
            try:
                await run(call.make(client), {**given, name: value})
            except Exception as error:
                outcome = error
            fault = fault_of(outcome, names, is_fitting)
            if fault:
                faults.append(f"{name}={value!r:.40}: {fault}")
    return faults


def fault_of(outcome: Exception | None, names: set[str], is_fitting: bool) -> str:
    if isinstance(outcome, InvalidArgument):
        for one in names:
            if outcome.field == one or outcome.field.startswith((f"{one}[", f"{one}.")):
                return ""
        return f"the error names {outcome.field!r}"
    if outcome is not None and not isinstance(outcome, SlateMQError):
        return f"{type(outcome).__name__}: {outcome}"
    return "" if is_fitting else f"is accepted, and then {outcome!r}"


def own(name: str) -> Make:
    return lambda client: getattr(client, name)


OTHERS_GIVEN: Mapping[str, Mapping[str, Any]] = {
    "update_queue": {"filter": "true"},
    "execute": {"commands": [slatemq.Complete(LEASE)]},
    "publish_batch": {"messages": [slatemq.OutgoingMessage(b"")]},
    "redrive_archived": {"dead_letters": [slatemq.ArchivedDeadLetter(ARCHIVED, b"")]},
    "drop_archived": {"entries": [ARCHIVED]},
    "settle_dead_letters": {"settlements": [slatemq.DropDeadLetter("q/1/f1")]},
}

CLIENT_CALLS = {
    name: Call(found, own(name), given=OTHERS_GIVEN.get(name, {}))
    for name, found in inspect.getmembers(slatemq.Client, inspect.isfunction)
    if not name.startswith("_") and parameters_of(found)
}


def claimed() -> Claimed:
    run = consumer_pb2.ClaimedRun(message_ids=[1], payloads=[b"1"], lease_token=LEASE)
    run.lease_ms = 60_000
    return Claimed([run], [0], [LEASE], [b"1"], [])


def delivered(client: slatemq.Client) -> Received:
    (message,) = received(claimed(), client._origin("q"))
    return message


def of_message(name: str) -> Make:
    def make(client: slatemq.Client) -> Callable[..., Any]:
        return getattr(delivered(client), name)  # type: ignore[no-any-return]

    return make


def of_batch(name: str) -> Make:
    def make(client: slatemq.Client) -> Callable[..., Any]:
        origin = client._origin("q")
        return getattr(slatemq.Batch(received(claimed(), origin), origin), name)  # type: ignore[no-any-return]

    return make


def of_refs(name: str) -> Make:
    def make(client: slatemq.Client) -> Callable[..., Any]:
        refs = client.queue_view("q", JSON).refs
        token = refs.upgrade(refs.add_claimed(delivered(client)))
        return lambda **given: getattr(refs, name)(**{"token": token, **given})

    return make


def of_commands(name: str) -> Make:
    """What a command of a queue is about is sent, and refused, when it is executed."""

    def make(client: slatemq.Client) -> Callable[..., Any]:
        refs = client.queue_view("q", JSON).refs
        commands = client.queue_commands("q", JSON)
        token = commands.complete([refs.upgrade(refs.add_claimed(delivered(client)))])  # type: ignore[list-item]
        of_token = {"token": token} if name == "push" else {}
        return lambda **given: client.execute([getattr(commands, name)(**{**of_token, **given})])

    return make


def of_command(kind: Any) -> Call:
    return Call(
        kind, lambda client: lambda **given: client.execute([kind(**given)]), "commands[0].{}"
    )


def of_settlement(kind: Any) -> Call:
    return Call(
        kind,
        lambda client: lambda **given: client.settle_dead_letters([kind(**given)]),
        "settlements[0].{}",
    )


def of_backoff(kind: Any) -> Call:
    return Call(
        kind,
        lambda client: lambda **given: client.create_queue("q", backoff=kind(**given)),
        "backoff.{}",
        {"kind": "fixed", "initial_ms": 1},
    )


def connecting(name: str, kind: Any, instead: Mapping[str, str]) -> Call:
    return Call(
        kind,
        lambda _: lambda **given: slatemq.connect("h:1", **{name: kind(**given)}),
        instead=instead,
    )


def of_set(name: str) -> Make:
    return lambda _: getattr(slatemq.RefSet(), name)


def of_store(name: str) -> Make:
    return lambda _: getattr(slatemq.TextQueueStore(**STORE), name)


STORE: Mapping[str, Any] = {
    "queue": TextQueue("/nowhere/queue.tq"),
    "refs": slatemq.RefSet(),
    "codec": JSON,
}

OTHER_CALLS = {
    "connect": Call(slatemq.connect, lambda _: slatemq.connect),
    "connect of slatemq.sync": Call(
        slatemq.sync.connect,
        lambda _: lambda **given: asyncio.to_thread(slatemq.sync.connect, **given),
    ),
    "BatchSettings": connecting("batches", slatemq.BatchSettings, {}),
    "Credentials": connecting(
        "credentials",
        slatemq.Credentials,
        {"cert": "key", "key": "cert", "encryption_keys": "encryption"},
    ),
    "Credentials.load": Call(
        slatemq.Credentials.load, lambda _: slatemq.Credentials.load, left_out=("environ",)
    ),
    **{
        f"Received.{name}": Call(getattr(slatemq.Received, name), of_message(name))
        for name in ("nack", "release", "fail", "extend")
    },
    "Published.handle": Call(slatemq.Published.handle, lambda _: slatemq.Published(1, 1).handle),
    "Batch.nack_all": Call(slatemq.Batch.nack_all, of_batch("nack_all")),
    "OutgoingMessage": Call(
        slatemq.OutgoingMessage,
        lambda client: lambda **given: client.publish_batch([slatemq.OutgoingMessage(**given)]),
        "messages[0].{}",
        may_be_none=("headers",),
    ),
    "QueueDraft": Call(
        slatemq.QueueDraft,
        lambda client: lambda **given: client.explain({}, draft=slatemq.QueueDraft(**given)),
        "draft.{}",
    ),
    **{
        f"Backoff.{name}": of_backoff(getattr(slatemq.Backoff, name))
        for name in ("fixed", "linear", "exponential")
    },
    "Backoff": of_backoff(slatemq.Backoff),
    **{
        kind.__name__: of_command(kind)
        for kind in (
            slatemq.Complete,
            slatemq.Fail,
            slatemq.Release,
            slatemq.Extend,
            slatemq.Transfer,
            slatemq.Push,
        )
    },
    **{
        kind.__name__: of_settlement(kind)
        for kind in (
            slatemq.DropDeadLetter,
            slatemq.NoteDeadLetter,
            slatemq.RedriveDeadLetter,
            slatemq.ReplaceDeadLetter,
        )
    },
    "ArchivedDeadLetter": Call(
        slatemq.ArchivedDeadLetter,
        lambda client: (
            lambda **given: client.redrive_archived([slatemq.ArchivedDeadLetter(**given)])
        ),
        "dead_letters[0].{}",
        {"entry": ARCHIVED},
    ),
    "CommandContext.add": Call(
        slatemq.CommandContext.add,
        lambda _: lambda commands: slatemq.CommandContext().add(commands),
    ),
    "QueueCommand.execute": Call(
        slatemq.QueueCommand.execute, lambda _: slatemq.QueueCommand([]).execute
    ),
    "QueueCommands.complete": Call(
        slatemq.QueueCommands.complete,
        lambda client: client.queue_commands("q", JSON).complete,
    ),
    "QueueCommands.push": Call(slatemq.QueueCommands.push, of_commands("push"), "commands[0].{}"),
    "QueueCommands.push_item": Call(
        slatemq.QueueCommands.push_item,
        of_commands("push_item"),
        "commands[0].{}",
        left_out=("item",),  # Its codec may raise anything.
    ),
    "MessageRefs.extend": Call(slatemq.MessageRefs.extend, of_refs("extend")),
    "MessageRefs.lease": Call(slatemq.MessageRefs.lease, of_refs("lease")),
    "MessageRefs.upgrade": Call(
        slatemq.MessageRefs.upgrade,
        lambda client: client.queue_view("q", JSON).refs.upgrade,
    ),
    **{
        f"RefSet.{name}": Call(getattr(slatemq.RefSet, name), of_set(name))
        for name in ("add", "upgrade", "lease", "references")
    },
    "MemoryQueue": Call(slatemq.MemoryQueue, lambda _: slatemq.MemoryQueue),
    "MemoryQueue.push": Call(slatemq.MemoryQueue.push, lambda _: slatemq.MemoryQueue().push),
    "QueueView": Call(
        slatemq.QueueView,
        lambda _: slatemq.QueueView,
        given={"store": slatemq.MemoryQueue(), "refs": slatemq.RefSet()},
    ),
    "TextQueueStore": Call(slatemq.TextQueueStore, lambda _: slatemq.TextQueueStore, given=STORE),
    "TextQueueStore.complete": Call(slatemq.TextQueueStore.complete, of_store("complete")),
    "TextQueueStore.fail": Call(
        slatemq.TextQueueStore.fail, of_store("fail"), given={"tokens": ()}
    ),
    "TextQueueStore.release": Call(slatemq.TextQueueStore.release, of_store("release")),
}
"""Those that are not of the client, by name, and the values that calls of the client take."""

WITHOUT_ARGUMENTS = {
    *("AccessCheck", "AccessRule", "Archived", "ArchivedOutcome", "Attempt", "BackoffKind"),
    *("BatchConsumer", "Caller", "CertificateExpiry", "CommandResult", "Consumer", "Counts"),
    *("DelayedWatch", "DeletedQueue", "Entry", "EntryPage", "EntryState", "EntryView"),
    *("EventsStatus", "Examination", "Explanation", "Instance", "ItemLease", "JobProgress"),
    *("JobRun", "JobRunState", "MessageLease", "MessageToken", "MessageView"),
    *("PriorityCounts", "Quarantine", "Queue", "QueueStore", "Redrive"),
    *("RedriveState", "RefToken", "Replay", "ReplayRange", "RouteStatus", "SearchProgress"),
    *("ServiceStatus", "Status", "StoredMessage", "Task", "TaskState", "Topology", "Totals"),
    "TransferToken",
}
"""What the client makes, and whose methods take nothing; `requeue` is for `slatemq.sync`."""


def test_each_name_of_the_package_is_tried_or_takes_nothing() -> None:
    tried = {name.split(".")[0].split(" ")[0] for name in OTHER_CALLS} | {"Client"}

    assert tried | WITHOUT_ARGUMENTS == set(slatemq.__all__)
    assert not tried & WITHOUT_ARGUMENTS
    for name in WITHOUT_ARGUMENTS:
        for method, found in vars(getattr(slatemq, name)).items():
            if inspect.isfunction(found) and not method.startswith("_") and method != "requeue":
                assert not parameters_of(found), f"{name}.{method}"


@pytest.mark.parametrize("name", [*CLIENT_CALLS, *OTHER_CALLS])
async def test_each_argument_that_cannot_be_sent_is_named(name: str, endpoint: str) -> None:
    client = slatemq.connect(endpoint, call_timeout=0.5)
    try:
        faults = await faults_of({**CLIENT_CALLS, **OTHER_CALLS}[name], client)
    finally:
        await client.close()
    assert not faults, "\n".join(faults)


def test_the_synchronous_calls_are_those_of_the_client() -> None:
    for face, kind in (
        (slatemq.sync.SyncClient, slatemq.Client),
        (slatemq.sync.Received, slatemq.Received),
        (slatemq.sync.Batch, slatemq.Batch),
    ):
        for name, found in vars(face).items():
            if inspect.isfunction(found) and not name.startswith("_") and parameters_of(found):
                assert inspect.unwrap(found) is getattr(kind, name)
    missing = CLIENT_CALLS.keys() - vars(slatemq.sync.SyncClient).keys()
    assert missing == {"process", "list_answering"}


WORDS: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("commands", "a list of commands, not str", lambda c: c.execute("x")),
    ("commands[0]", "a command, such as", lambda c: c.execute(["x"])),
    ("tokens[0]", "a MessageToken, not str", lambda c: c.queue_commands("q", JSON).complete(["x"])),
    ("payload", "bytes or text, not int", lambda c: c.publish(5)),
    ("payload", "UTF-8 text", lambda c: c.publish(SURROGATE)),
    ("messages[0].payload", "bytes or text, not str", lambda c: c.publish_many([TEXT])),
    ("messages[1].payload", "UTF-8 text", lambda c: c.publish_many(["a", SURROGATE])),
    ("messages[0]", "an OutgoingMessage", lambda c: c.publish_batch([b"x"])),
    ("headers", "a mapping of text to text, not str", lambda c: c.publish(b"", "h")),
    ("headers['a']", "text, not int", lambda c: c.publish(b"", {"a": 5})),
    ("headers[b'a']", "text, not bytes", lambda c: c.explain({b"a": "b"})),
    ("visible_at", "a datetime, not str", lambda c: c.publish(b"", visible_at="+5m")),
    ("delay", "seconds or a timedelta, not str", lambda c: c.publish(b"", delay="5m")),
    ("delay", "a finite", lambda c: c.publish(b"", delay=float("inf"))),
    ("dedupe_key", "not empty", lambda c: c.publish(b"", dedupe_key="")),
    ("wait", "0 to 60 s, not 61 s", lambda c: c.claim("q", wait=61)),
    ("wait", "0 s or more, not nan s", lambda c: c.claim("q", wait=float("nan"))),
    ("concurrency", "1 to 50,000, not 0", lambda c: c.process("q", handle, concurrency=0)),
    ("lease_tokens", "a list of lease tokens, not str", lambda c: c.ack(LEASE)),
    ("backoff", "a Backoff, such as", lambda c: c.create_queue("q", backoff="fixed:1s")),
    ("start_from", "now, beginning or", lambda c: c.create_queue("q", start_from="yesterday")),
    ("max_attempts", "fit into 32 bits", lambda c: c.update_queue("q", max_attempts=1 << 40)),
    ("message_ids", "a list of whole numbers", lambda c: c.start_redrive("q", message_ids="12")),
    ("rate", "a whole number, not float", lambda c: c.start_redrive("q", rate=0.5)),
    ("newest_first", "true or false, not int", lambda c: c.entry_page("q", "done", newest_first=1)),
    ("state", "one of available, delayed", lambda c: c.entry_page("q", b"done")),
    ("queue_id", "text, not NoneType", lambda c: c.get_queue(None)),
    ("verb", "one of ", lambda c: c.check_access("p", "x")),
]
"""The field of an error, and words of its description."""


@pytest.mark.parametrize(("name", "expected", "call"), WORDS)
async def test_an_error_says_what_an_argument_must_be(
    name: str, expected: str, call: Callable[[Any], Any]
) -> None:
    client = slatemq.connect("127.0.0.1:1", call_timeout=0.1)

    with pytest.raises(InvalidArgument) as refused:
        await call(client)

    assert refused.value.field == name
    assert expected in refused.value.description


def test_a_list_that_can_be_read_only_once_is_sent_whole() -> None:
    request = message_of(entry_pb2.StartRedriveRequest, message_ids=iter([1, 2]))

    assert list(request.message_ids) == [1, 2]
    with pytest.raises(InvalidArgument, match="message_ids: must be a list of whole numbers"):
        message_of(entry_pb2.StartRedriveRequest, message_ids=iter([1, "2"]))


def test_a_wrong_token_is_named_without_asyncio_too() -> None:
    client = slatemq.sync.connect("127.0.0.1:1", call_timeout=0.1)
    wrong: Any = "x"
    try:
        with pytest.raises(InvalidArgument, match="token: must be a TransferToken, not str"):
            client.queue_commands("q", JSON).push(wrong)
        with pytest.raises(InvalidArgument, match="token: must be a MessageToken, not str"):
            client.queue_view("q", JSON).refs.lease(wrong)
    finally:
        client.close()
