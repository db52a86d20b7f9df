"""What each RPC asks of its caller, as its proto file says (`slatemq/v1/access.proto`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor

from libs.access.verbs import Verb
from slatemq.v1 import access_pb2

Caller = Literal["service", "authenticated", "anyone"] | Verb

Reader = Callable[[Any], Iterator[str]]


@dataclass(frozen=True, slots=True)
class MethodAccess:
    """What one RPC asks.

    Attributes:
        caller: Who may call: services, who proves who it is, anyone; or the verb that must be
            permitted.
        readers: Read the IDs of queues from a request.
        queues_field: The field that has the first of them.
        detail_readers: Read what else the audit has of it, as `run_id=ab12`.
        is_stream: Whether a call lasts for as long as its caller or the service likes.
        waits: Whether a call may wait, as a claim does for messages.
        publishes: Whether a call counts towards the limits on publishes, not the one on calls.
    """

    caller: Caller
    readers: tuple[Reader, ...] = ()
    queues_field: str = ""
    is_stream: bool = False
    waits: bool = False
    detail_readers: tuple[Reader, ...] = ()
    publishes: bool = False

    def details(self, request: Any) -> Iterator[str]:
        """What a request is about besides queues."""
        for read in self.detail_readers:
            yield from read(request)

    def queues(self, request: Any) -> Iterator[str]:
        """The queues that a request names, in its order; some may come twice."""
        for read in self.readers:
            for text in read(request):
                if queue := text.partition("/")[0]:
                    yield queue


OF_OTHERS: Final = {
    "/grpc.health.v1.Health/": MethodAccess("anyone"),
    "/grpc.reflection.v1.ServerReflection/": MethodAccess("authenticated", is_stream=True),
    "/grpc.reflection.v1alpha.ServerReflection/": MethodAccess("authenticated", is_stream=True),
}
"""Services whose protos are not ours: probes have no token."""


def access_of(method: str) -> MethodAccess:
    """What `/slatemq.v1.QueueService/GetQueue` asks of its caller.

    Raises:
        LookupError: It is not an RPC of a service that is known here, or its proto does not say.
    """
    for prefix, access in OF_OTHERS.items():
        if method.startswith(prefix):
            return access
    name = method.removeprefix("/").replace("/", ".")
    described: MethodDescriptor
    try:
        described = descriptor_pool.Default().FindMethodByName(name)
    except KeyError as error:
        raise LookupError(f"there is no RPC {method}") from error
    option = described.GetOptions().Extensions[access_pb2.access]
    which = option.WhichOneof("caller")
    if which is None:
        raise LookupError(f"the proto of {method} does not say who may call it")
    readers = tuple(_reader(described.input_type, path.split(".")) for path in option.queues)
    # The numbers come first: an act has the first details alone.
    detail_readers = (
        *(_counter(described.input_type, name) for name in option.counted),
        *(_detail_reader(described.input_type, path.split(".")) for path in option.audited),
    )
    word: str = which
    if which == "verb":
        word = access_pb2.Verb.Name(option.verb).removeprefix("VERB_").lower()
    is_stream = described.client_streaming or described.server_streaming
    field = option.queues[0].split(".")[0] if option.queues else ""
    return MethodAccess(
        cast("Caller", word),
        readers,
        field,
        is_stream,
        option.waits,
        detail_readers,
        option.publishes,
    )


def _reader(message: Descriptor, path: Sequence[str]) -> Reader:
    """Reads the texts at a path of fields, as in `start.queue_id`."""
    field = _field(message, path[0])
    name, inner = path[0], None
    if len(path) > 1:
        if field.message_type is None:
            raise LookupError(f"{message.full_name}.{name} is not a message")
        inner = _reader(field.message_type, path[1:])
    elif field.type != FieldDescriptor.TYPE_STRING:
        raise LookupError(f"{message.full_name}.{name} is not a string")
    if field.is_repeated:
        return lambda request: _each(getattr(request, name), inner)
    if inner is not None or field.has_presence:
        return lambda request: (
            _each([getattr(request, name)], inner) if request.HasField(name) else iter(())
        )
    return lambda request: iter((getattr(request, name),))


def _field(message: Descriptor, name: str) -> FieldDescriptor:
    field: FieldDescriptor | None = message.fields_by_name.get(name)
    if field is None:
        raise LookupError(f"{message.full_name} has no field {name}")
    return field


def _detail_reader(message: Descriptor, path: Sequence[str], prefix: str = "") -> Reader:
    """Reads the value at a path of fields, as `settings.retention_s=60`; of a message, each.

    Of a repeated field, it reads each of its values.
    """
    field = _field(message, path[0])
    name, label = path[0], f"{prefix}{path[0]}"
    is_repeated = field.is_repeated
    if field.type == FieldDescriptor.TYPE_BYTES:
        raise LookupError(f"{message.full_name}.{name} is not for the audit")
    if field.message_type is not None:
        paths = (
            [path[1:]] if len(path) > 1 else [[one] for one in field.message_type.fields_by_name]
        )
        readers = [_detail_reader(field.message_type, inner, f"{label}.") for inner in paths]

        def read_messages(request: Any) -> Iterator[str]:
            inner = getattr(request, name)
            for value in inner if is_repeated else (inner,):
                for read in readers:
                    yield from read(value)

        return read_messages

    def read_values(request: Any) -> Iterator[str]:
        found = getattr(request, name)
        if is_repeated:
            yield from (f"{label}={_in_words(field, value)}" for value in found)
        elif found != "" and not (field.has_presence and not request.HasField(name)):
            yield f"{label}={_in_words(field, found)}"

    return read_values


def _counter(message: Descriptor, name: str) -> Reader:
    """Reads how many items a repeated field has, as `message_ids=3`.

    Of messages with a oneof, how many set each field of it: `drop=980`, `no_action=1`.
    """
    field = _field(message, name)
    if not field.is_repeated:
        raise LookupError(f"{message.full_name}.{name} is not repeated")
    oneofs = [] if field.message_type is None else field.message_type.oneofs
    choice = oneofs[0].name if oneofs else ""

    def read(request: Any) -> Iterator[str]:
        items = getattr(request, name)
        if choice:
            kinds = Counter(item.WhichOneof(choice) or f"no_{choice}" for item in items)
            yield from (f"{kind}={count}" for kind, count in kinds.items())
        elif items:
            yield f"{name}={len(items)}"

    return read


def _in_words(field: FieldDescriptor, value: Any) -> str:
    if field.enum_type is not None:
        named = field.enum_type.values_by_number.get(value)
        return str(value) if named is None else named.name
    return str(value).lower() if isinstance(value, bool) else str(value)


def _each(values: Sequence[Any], inner: Reader | None) -> Iterator[str]:
    for value in values:
        if inner is None:
            yield value
        else:
            yield from inner(value)
