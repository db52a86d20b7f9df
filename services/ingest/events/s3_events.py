"""`POST /s3-events`: notifications of S3 stores, published as events; loaded where it has a token.

A document is published in one request for each ingest shard that the dedupe keys of its events fall
to, through the shards' own gRPC port: what holds for any publish holds for these. A store that gets
no 200 sends the document again, and nothing is stored twice.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Final

import grpc.aio

from libs.serving.http.parts import HttpPost, HttpReply
from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.storage.errors import StorageError
from slatemq._file_status import FilesValue
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq._secrets import read_secret
from slatemq.dedupe_shards import dedupe_shard
from slatemq.errors import WRONG_SHARD, InvalidArgument, Unavailable
from slatemq.events import message_of, read_notifications
from slatemq.events.s3 import Notifications, read_subscription
from slatemq.models import OutgoingMessage
from slatemq.v1.ingest_pb2 import PublishRequest, PublishResponse, PublishRun
from slatemq.v1.ingest_pb2_grpc import IngestServiceStub

log = logging.getLogger(__name__)

S3_EVENTS_PATH: Final = "/s3-events"

BODY_BYTES_MAX: Final = 1 << 20
"""AWS sends at most 256 KiB, MinIO and Ceph one record; 64 of these may be in memory."""

_REFUSED: Final = HttpReply(
    HTTPStatus.UNAUTHORIZED,
    {
        "error": "the Authorization header must be Bearer and the token, or Basic with the token "
        "as the password"
    },
    # Clients with a name and a password in their URL may send them only when challenged.
    {"WWW-Authenticate": 'Basic realm="slatemq"'},
)


def _password(text: str) -> bytes:
    """The password of Basic credentials (RFC 7617), with any user name."""
    try:
        return base64.b64decode(text).partition(b":")[2]
    except ValueError:
        return b""


_READERS: Final[Mapping[str, Callable[[str], bytes]]] = {
    "bearer": lambda text: text.encode(errors="replace"),
    "basic": _password,
}
"""Give the token of an Authorization header, by its scheme."""


def token_of(text: str, file: str) -> Callable[[], str]:
    """The token as it is now: this text, or what the file says.

    Raises:
        InvalidArgument: There are both, or the file has no token.
    """
    if not file:
        return lambda: text
    if text:
        raise InvalidArgument("", "not together with SLATEMQ_S3_EVENTS_TOKEN")
    path = Path(file)

    def read() -> str:
        try:
            token = read_secret(path).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            problem = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise InvalidArgument("", f"cannot read {path}: {problem}") from None
        if not token:
            raise InvalidArgument("", f"{path} is empty")
        return token

    newest = FilesValue(read, path)
    return lambda: newest.value


def _read(body: bytes, event_bytes_max: int) -> tuple[Notifications, list[OutgoingMessage]]:
    """What a document says, and the messages to publish: no ingest refuses one of them alone."""
    notifications = read_notifications(body, event_bytes_max)
    return notifications, [message_of(event) for event in notifications.events]


class S3Events:
    """The path, and the calls behind it.

    Attributes:
        post: For the HTTP port.
        held_bytes: Of the documents in work.
    """

    def __init__(
        self,
        directory: TopologyDirectory,
        channels: Channels,
        token: Callable[[], str],
        payload_bytes_max: int,
    ) -> None:
        """Publish by these channels what comes with the token."""
        self._directory = directory
        self._channels = channels
        self._token = token
        self._payload_bytes_max = payload_bytes_max
        self._reading = asyncio.Lock()
        self.held_bytes = 0
        self.post = HttpPost(S3_EVENTS_PATH, BODY_BYTES_MAX, self._answer, self._check)

    def _check(self, headers: Mapping[str, str]) -> HttpReply | None:
        scheme, _, text = headers.get("authorization", "").partition(" ")
        read = _READERS.get(scheme.lower())
        token = self._token().encode()
        is_right = read is not None and hmac.compare_digest(read(text.strip()), token)
        if is_right:
            return None
        if text:  # clients that wait to be challenged send none at first
            log.warning("a document came to %s with a wrong token", S3_EVENTS_PATH)
        return _REFUSED

    async def _answer(self, body: bytes) -> HttpReply:
        self.held_bytes += len(body)
        try:
            return await self._answer_to(body)
        finally:
            self.held_bytes -= len(body)

    async def _answer_to(self, body: bytes) -> HttpReply:
        # Thousands of records take long: in a thread, and one document at a time.
        async with self._reading:
            notifications, messages = await asyncio.to_thread(_read, body, self._payload_bytes_max)
        subscription = None if notifications.events else read_subscription(body)
        if subscription is not None:
            # This process opens no address that a request names, and a log shows none with a token.
            log.warning(
                "SNS sends nothing until its subscription is confirmed: "
                "aws sns confirm-subscription --topic-arn %s --token %s",
                *subscription,
            )
        answers = await self._publish(messages) if messages else []
        task_ids = [answer.task_id for answer in answers if answer.task_id]
        duplicates = sum(len(answer.duplicates) for answer in answers)
        accepted = sum(len(answer.message_ids) for answer in answers if answer.task_id)
        fields: dict[str, object] = {
            "published_count": len(messages) - duplicates - accepted,
            "duplicate_count": duplicates,
            "skipped_count": notifications.skipped_count,
        }
        if not task_ids:
            return HttpReply(HTTPStatus.OK, fields)
        fields |= {"accepted_count": accepted, "task_ids": task_ids}
        return HttpReply(HTTPStatus.ACCEPTED, fields)

    async def _publish(self, messages: Sequence[OutgoingMessage]) -> list[PublishResponse]:
        try:
            return await self._publish_by(messages, await self._shards())
        except InvalidArgument as error:
            if error.reason != WRONG_SHARD:
                raise
            # A shard was added meanwhile.
            return await self._publish_by(messages, await self._shards(is_doubted=True))

    async def _shards(self, *, is_doubted: bool = False) -> Sequence[int]:
        directory = self._directory
        try:
            topology = await (directory.read(0) if is_doubted else directory.read_soon())
        except StorageError as error:
            raise Unavailable(str(error), reason="STORE_UNAVAILABLE") from error
        shards = topology.open_ingests
        if not shards:
            raise Unavailable("no ingest has announced itself", reason="PEER_UNKNOWN")
        return shards

    async def _publish_by(
        self, messages: Sequence[OutgoingMessage], shards: Sequence[int]
    ) -> list[PublishResponse]:
        by_shard: dict[int, list[OutgoingMessage]] = {}
        for message in messages:
            shard = dedupe_shard(message.dedupe_key or "", shards)
            by_shard.setdefault(shard, []).append(message)
        return await asyncio.gather(*(self._send(shard, part) for shard, part in by_shard.items()))

    async def _send(self, shard: int, messages: Sequence[OutgoingMessage]) -> PublishResponse:
        request = PublishRequest(
            runs=[
                PublishRun(
                    payloads=[message.payload],
                    headers=message.headers,
                    created_at_ms=message.created_at_ms,
                    dedupe_keys=[message.dedupe_key or ""],
                )
                for message in messages
            ]
        )
        try:
            with raising_slatemq_errors():
                stub = IngestServiceStub(await self._channels.to("ingest", shard))
                answer: PublishResponse = await stub.Publish(request)
                return answer
        except StorageError as error:
            raise Unavailable(str(error), reason="STORE_UNAVAILABLE") from error
        except Unavailable:
            self._channels.doubt("ingest", shard)
            raise
        except grpc.aio.UsageError as error:  # the channel was closed: the peer has moved
            raise Unavailable(str(error), reason="PEER_MOVED") from error
