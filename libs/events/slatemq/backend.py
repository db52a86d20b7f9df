"""The backend of SlateMQ."""

from __future__ import annotations

import logging
import math

import slatemq
from libs.events.backend import QueueBackend
from libs.events.settings import SlatemqSettings
from libs.events.slatemq.events import Events
from libs.events.slatemq.headers import TASKS_HEADER
from libs.events.slatemq.queues import Queues, translated
from libs.events.slatemq.tasks import Tasks
from slatemq.errors import (
    DataLoss,
    InvalidArgument,
    PermissionDenied,
    SlateMQError,
    Unauthenticated,
)

log = logging.getLogger(__name__)

CALL_S = 10.0


class SlatemqBackend(QueueBackend):
    NAME = "SlateMQ"
    _translated = staticmethod(translated)

    _queues: Queues

    async def open(self, config: SlatemqSettings) -> None:
        with translated():
            try:
                client = slatemq.connect(
                    config.endpoint, call_timeout=CALL_S, credentials=slatemq.Credentials.load()
                )
                await client.__aenter__()
                self._queues = Queues(client, config)
                self._compose(
                    Events(self._queues),
                    Tasks(self._queues, is_sole_consumer=self._is_sole_consumer),
                )
                await self._queues.ensure_queue(self._queues.tasks, TASKS_HEADER, ())
                self.message_bytes_max = await _payload_bytes_max(client)
            except InvalidArgument as error:
                raise InvalidArgument(*_key_and_problem(error)) from error
            except Unauthenticated as error:
                raise InvalidArgument(*_of_credentials(error)) from error
            except PermissionDenied as error:
                raise InvalidArgument("queue.slatemq.queue_prefix", error.message) from error

    async def disconnect(self) -> None:
        await self._queues.client.close()

    async def ping(self) -> None:
        await self._queues.client.get_queue(self._queues.tasks)


async def _payload_bytes_max(client: slatemq.Client) -> float:
    """The largest payload by the settings of the instance; an ingest may run with older ones."""
    try:
        instance = await client.get_instance()
    except DataLoss as error:  # its processes go on with what they have read
        log.warning("SlateMQ does not say how large a payload may be: %s", error)
        return math.inf
    return instance.settings["payload_bytes_max"]


def _key_and_problem(error: InvalidArgument) -> tuple[str, str]:
    """The setting that a refusal of the client, or of the server, is about."""
    if error.field == "endpoint":
        return "queue.slatemq.endpoint", error.description
    if error.field == "queue_id":
        return "queue.slatemq.queue_prefix", error.description
    return _of_credentials(error)


def _of_credentials(error: SlateMQError) -> tuple[str, str]:
    """The credentials are no settings of the file, but those of the endpoint."""
    source = "the credentials, from SLATEMQ_… variables or the profile"
    return "queue.slatemq.endpoint", f"{source}: {error.message}"
