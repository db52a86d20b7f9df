"""What both parts of the backend share: the client, the names of queues, how messages end."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Collection, Iterator, Sequence, Set
from contextlib import contextmanager

import slatemq
from libs.events.cancellations import keeping_cancellations
from libs.events.deliveries import group_of
from libs.events.refusals import TooLarge
from libs.events.settings import SlatemqSettings
from slatemq.errors import (
    AlreadyExists,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    SlateMQError,
    Unavailable,
)

log = logging.getLogger(__name__)

TYPE_HEADER = "type"

PREFETCH = 10

ATTEMPTS_MAX = 65_535
"""Of the queues: tasks and settings count for themselves when an attempt is the last."""


CLOCKS_MS = 60_000
"""How far the clocks of this machine and of the ingests may be apart."""


@contextmanager
def translated() -> Iterator[None]:
    """A call that was not answered in time, or not let in, is one to repeat."""
    try:
        with keeping_cancellations():
            yield
    except InvalidArgument as error:
        if not error.field.endswith(".payload"):
            raise
        # As in `messages[3].payload`: of a payload only the size is judged.
        raise TooLarge(f"SlateMQ refuses it: {error}") from error
    except (DeadlineExceeded, ResourceExhausted, ConnectionError) as error:
        raise Unavailable(f"SlateMQ does not answer: {error}", reason="BACKEND_DOWN") from error


def undecrypted(
    message: slatemq.Received | slatemq.StoredMessage,
) -> FailedPrecondition | DataLoss | None:
    """Why its payload cannot be decrypted; None: it can.

    FailedPrecondition: this process lacks its key, and may have it at another attempt.
    """
    try:
        message.payload  # noqa: B018 - which is decrypted when it is read
    except (FailedPrecondition, DataLoss) as error:
        return error
    return None


class Queues:
    def __init__(self, client: slatemq.Client, settings: SlatemqSettings) -> None:
        self.client = client
        self.settings = settings
        self.tasks = f"{settings.queue_prefix}.tasks"
        self.events = self.events_of(frozenset())

    def events_of(self, types: Set[str]) -> str:
        """The queue of subscribers with these types."""
        return group_of(
            f"{self.settings.queue_prefix}.events.{self.settings.consumer_group}", types
        )

    async def ensure_queue(
        self, queue_id: str, header: str, types: Collection[str], since_ms: int | None = None
    ) -> None:
        """Create a queue, or change its filter where it exists.

        With `since_ms` a new one gets what was published since then, too.
        """
        prefix = json.dumps(self.settings.queue_prefix)
        text = f'headers["{header}"] == {prefix}'
        if types:
            text += f" && headers.{TYPE_HEADER} in {json.dumps(sorted(types))}"
        try:
            await self.client.create_queue(
                queue_id,
                filter=text,
                max_attempts=ATTEMPTS_MAX,
                start_from="now" if since_ms is None else since_ms,
            )
        except AlreadyExists:
            await self.client.update_queue(queue_id, filter=text)

    async def create_again(
        self, queue_id: str, header: str, types: Collection[str], seen_ms: int
    ) -> None:
        """Create a queue that was deleted, with what was published since it was there last."""
        log.error("SlateMQ has lost the queue %r, creating it again", queue_id)
        await self.ensure_queue(queue_id, header, types, since_ms=max(0, seen_ms - CLOCKS_MS))

    async def takes(self, message: slatemq.Received, header: str) -> bool:
        """Whether a message is of this backend; one that is not becomes a dead letter.

        Pushes come into a queue past its filter, and to publish the header takes more than to push.
        """
        if message.headers.get(header) == self.settings.queue_prefix:
            return True
        await finish(message.fail(f"its header {header} is not {self.settings.queue_prefix}"))
        return False

    async def end_attempt(
        self, message: slatemq.Received, why: str, *, has_retries_left: bool
    ) -> None:
        """Let a message come again after the retry delay, or make it a dead letter."""
        if has_retries_left:
            await finish(message.nack(why, self.settings.retry_delay_ms / 1000))
        else:
            await finish(message.fail(why))


async def finish(finishing: Awaitable[object]) -> bool:
    """Finish a message; False where its lease has ended: it comes again, to another perhaps."""
    try:
        await finishing
    except (FailedPrecondition, NotFound) as error:
        log.info("comes again: %s", error)
        return False
    return True


async def release(messages: Sequence[slatemq.Received]) -> None:
    """Let other consumers get these messages immediately."""
    releasing = (message.release() for message in messages)
    for error in await asyncio.gather(*releasing, return_exceptions=True):
        if isinstance(error, SlateMQError):
            log.info("comes again when its lease ends: %s", error)
