"""What callers send by gRPC, the errors that clients get, and texts that callers keep."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, Final

from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status

import slatemq.v1
from libs.access.jwt_tokens import JwtTokens
from libs.access.token_file import token_id
from libs.documents import Document
from libs.serving.requests.shape import field_at_fault, walk
from libs.storage.records.configs import decode_config, encode_config
from libs.storage.records.execution_records import OutboxRecord, decode_outbox
from services.broker.core.batches.execute import Push
from services.broker.core.lifecycle import new_state
from services.broker.core.queue import Notes, Queue
from services.broker.core.settings import QueueSettings
from services.broker.entries import lister
from services.broker.entries.handles import parse_handle, waiting_handle
from services.broker.outbox.executor import drafts_of, final, fingerprint
from services.broker.outbox.pusher import PushLimits
from services.broker.requests.queues import (
    SETTINGS,
    changed,
    changes_of,
    checked_id,
    public,
    purges_of,
)
from services.broker.requests.tokens import parse_token, parse_tokens, token_text
from services.broker.rpc import queues as queue_calls
from services.ingest.read.etags import Etag
from services.ingest.wire import Rules, accept, accept_push
from slatemq._rpc.rpc_status import from_status, to_status
from slatemq.errors import InvalidArgument
from slatemq.v1 import consumer_pb2, entry_pb2, ingest_pb2, queue_pb2
from tests.fuzz.compare import Wrong, ended, same

_PAYLOAD_BYTES_MAX: Final = 1 << 20
_DELAY_MS_MAX: Final = 900_000
_RULES: Final = Rules(
    payload_bytes_max=_PAYLOAD_BYTES_MAX, retention_s=3600, delay_ms_max=_DELAY_MS_MAX
)
_PUSH_LIMITS: Final = PushLimits(_PAYLOAD_BYTES_MAX, _DELAY_MS_MAX)
_NOW_MS: Final = 1_767_225_600_000


# --- gRPC -------------------------------------------------------------------


@cache
def _requests() -> tuple[type[Any], ...]:
    """Every type of a request; first those that the corpus knows by their places."""
    first = [
        ingest_pb2.PublishRequest,
        ingest_pb2.PushRequest,
        queue_pb2.CreateQueueRequest,
        consumer_pb2.ExecuteRequest,
    ]
    found: dict[str, type[Any]] = {}
    for module in pkgutil.iter_modules(slatemq.v1.__path__, "slatemq.v1."):
        if module.name.endswith("_pb2"):
            for service in import_module(module.name).DESCRIPTOR.services_by_name.values():
                for method in service.methods:
                    found[method.input_type.full_name] = method.input_type._concrete_class
    return (*first, *(found[name] for name in sorted(found) if found[name] not in first))


def request(data: bytes) -> None:
    """A request as it comes: counted before it is parsed, then held to the rules of its call."""
    if not data:
        return
    kinds = _requests()
    kind, encoded = kinds[data[0] % len(kinds)], data[1:]
    for _ in walk(kind.DESCRIPTOR, encoded):
        pass
    try:
        parsed = kind.FromString(encoded)
    except DecodeError:
        field_at_fault(kind.DESCRIPTOR, encoded)
        raise
    check = _CHECKS.get(kind)
    if check is not None:
        check(parsed)


def _create_queue(asked: queue_pb2.CreateQueueRequest) -> None:
    queue_id = checked_id(asked.queue.queue_id, "queue.queue_id")
    settings = _changed(asked.queue, QueueSettings(filter=""), SETTINGS)
    public(queue_id, settings, 0).SerializeToString()


def _changed(
    queue: queue_pb2.Queue, before: QueueSettings, names: tuple[str, ...]
) -> QueueSettings:
    settings = changed(before, changes_of(queue, names, _DELAY_MS_MAX))
    stored = decode_config(encode_config(settings.record()))
    same(QueueSettings.from_record(stored), settings, "stored settings")
    return settings


def _update_queue(asked: queue_pb2.UpdateQueueRequest) -> None:
    names = tuple(path for path in asked.update_mask.paths if path in SETTINGS)
    _changed(asked.queue, QueueSettings(filter="true"), names)


def _execute(asked: consumer_pb2.ExecuteRequest) -> None:
    drafts = ended(drafts_of(asked, 0, _PUSH_LIMITS, _NOW_MS))
    for draft in drafts:
        if isinstance(draft, OutboxRecord):
            command = final(draft)
            assert isinstance(command, Push)
            same(decode_outbox(command.value), draft, "outbox row")
    again = consumer_pb2.ExecuteRequest.FromString(asked.SerializeToString())
    same(fingerprint(again.commands), fingerprint(asked.commands), "fingerprint")


def _list_entries(asked: entry_pb2.ListEntriesRequest) -> None:
    lister._checked(asked)
    after = lister._parsed(asked)
    if after is not None:
        asked.page_token = lister._token(asked, after)
        same(lister._parsed(asked), after, "page token")


_CHECKS: Final[Mapping[type[Any], Callable[[Any], object]]] = {
    ingest_pb2.PublishRequest: lambda asked: accept(asked, _RULES),
    ingest_pb2.PushRequest: lambda asked: accept_push(asked, _RULES),
    queue_pb2.CreateQueueRequest: _create_queue,
    queue_pb2.UpdateQueueRequest: _update_queue,
    queue_pb2.ListQueuesRequest: lambda asked: queue_calls._after(asked.page_token),
    queue_pb2.PurgeQueueRequest: lambda asked: purges_of(asked.states),
    consumer_pb2.ExecuteRequest: _execute,
    entry_pb2.ListEntriesRequest: _list_entries,
}


def answer(data: bytes) -> None:
    """The details of a failed call, as a client gets them: its error, and that error passed on."""
    status = Status.FromString(data)
    if status.code:
        error = from_status(status)
        again = from_status(Status.FromString(to_status(error).SerializeToString()))
        same(type(again), type(error), "error")


# --- Texts that callers keep ------------------------------------------------

_ISSUERS: Final = JwtTokens(Document("issuers", "issuers: []"))


def token(data: bytes) -> None:
    """A text that callers were given before: of a lease, an entry, a page; or that proves them."""
    if data:
        _TEXTS[data[0] % len(_TEXTS)](data[1:].decode(errors="surrogateescape"))


def _lease(text: str) -> None:
    texts = text.split(",")
    try:
        found = [parse_token(one, "lease_token") for one in texts]
    except InvalidArgument:
        same(parse_tokens(texts, 0), None, "tokens of which one is none")
        raise
    same(found, [parse_token(token_text(*one), "lease_token") for one in found], "lease token")
    known = parse_tokens(texts, found[0][0])
    if known is not None:
        same([(found[0][0], one) for one in known], found, "lease tokens")
    elif [token_text(*one) for one in found] == texts and len({one[0] for one in found}) == 1:
        raise Wrong(f"tokens of one shard are refused: {texts}")


def _handle(text: str) -> None:
    handle = parse_handle(text, 0)
    if handle.waiting is not None:
        queue = Queue(handle.queue_id, QueueSettings(""), new_state(None, 1), Notes())
        again = waiting_handle(queue, handle.message_id, handle.waiting)
        same(parse_handle(again, 0), handle, "handle")


def _queue_page(text: str) -> None:
    after = queue_calls._after(text)
    if after:
        same(queue_calls._page_token(after), text, "page token")


def _etag(text: str) -> None:
    if "-" in text:
        same(str(Etag.parse(text)), text, "etag")


def _bearer(text: str) -> None:
    token_id(text)
    ended(_ISSUERS.check(text))


_TEXTS: Final[tuple[Callable[[str], object], ...]] = (
    _lease,
    _handle,
    _queue_page,
    _etag,
    _bearer,
)
