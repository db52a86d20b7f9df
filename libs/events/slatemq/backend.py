"""The backend of SlateMQ."""

from __future__ import annotations

import slatemq
from libs.events.backend import QueueBackend
from libs.events.settings import SlatemqSettings
from libs.events.slatemq.events import Events
from libs.events.slatemq.headers import TASKS_HEADER
from libs.events.slatemq.queues import Queues, translated
from libs.events.slatemq.tasks import Tasks
from slatemq.errors import InvalidArgument

CALL_S = 10.0


class SlatemqBackend(QueueBackend):
    NAME = "SlateMQ"
    _translated = staticmethod(translated)

    _queues: Queues

    async def connect(self, config: SlatemqSettings) -> None:
        with translated():
            try:
                client = slatemq.connect(
                    config.endpoint, call_timeout=CALL_S, credentials=slatemq.Credentials.load()
                )
                await client.__aenter__()
                self._queues = Queues(client, config)
                self._compose(Events(self._queues), Tasks(self._queues))
                await self._queues.ensure_queue(self._queues.tasks, TASKS_HEADER, ())
            except InvalidArgument as error:
                raise InvalidArgument("queue.slatemq", error.message) from error

    async def disconnect(self) -> None:
        await self._queues.client.close()

    async def ping(self) -> None:
        await self._queues.client.get_queue(self._queues.tasks)
