"""What an ingest measures of its events."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from libs.events.settings import QueueSettings, RedisSettings
from libs.serving.http.server import Exposition
from libs.serving.telemetry import configure
from libs.storage.database.roots import Root, open_root
from services.ingest.config import IngestConfig
from services.ingest.edit.purge_rules import Reason
from services.ingest.edit.purging import Purge, Purged
from services.ingest.events.relay import IngestRelay
from services.ingest.shard import Shard
from slatemq.v1.ingest_pb2 import PublishRun
from tests.configs import config_of
from tests.manual_clock import ManualClock
from tests.ports import free_ports
from tests.unit.ingest import shards
from tests.unit.ingest.shards import accepted

HOLD_S = 60


class Scraped:
    """An ingest's telemetry as `GET /metrics` shows it."""

    def __init__(self) -> None:
        self._exposition = Exposition()
        self.telemetry = configure("ingest", "host/ingest-0", readers=[self._exposition.reader])

    def lost(self) -> list[tuple[str, float]]:
        """Type and value of each series of the events lost."""
        text = self._exposition.render(self.telemetry.series).decode()
        (kind,) = re.findall(r"^# TYPE slatemq_queue_lost_total (\w+)", text, re.MULTILINE)
        values = re.findall(r"^slatemq_queue_lost_total\{.*\} (\S+)", text, re.MULTILINE)
        return [(kind, float(value)) for value in values]


@asynccontextmanager
async def relayed(root: Root, clock: ManualClock) -> AsyncIterator[tuple[Shard, Scraped]]:
    """A shard whose events wait for a backend that is down."""
    (port,) = free_ports(1)
    redis = RedisSettings(url=f"redis://127.0.0.1:{port}")
    settings = QueueSettings(enabled=True, backend="redis", redis=redis)
    config = config_of(IngestConfig, root=root.url, events_hold_s=HOLD_S)
    scraped = Scraped()
    async with shards.opened(root, clock) as shard:
        relay = IngestRelay(config, settings, scraped.telemetry)
        await relay.start(shard)
        yield shard, scraped
        await relay.stop()


async def test_events_that_are_lost_are_counted_since_the_start_of_the_process() -> None:
    root, clock = open_root("memory:///"), ManualClock()
    async with relayed(root, clock) as (shard, scraped):
        assert scraped.lost() == [("counter", 0)]
        runs = [PublishRun(payloads=[b"x"], retention_s=HOLD_S) for _ in range(3)]
        first = (await shard.publisher.publish(accepted(*runs))).first_message_id
        clock.advance(3_600_000)
        lost = [first + n for n in range(3)]
        assert await shard.purger.purge(Purge(0, Reason.EXPIRED, lost)) == Purged(3, 3)

        assert scraped.lost() == [("counter", 3)]

    async with relayed(root, clock) as (_, scraped):
        assert scraped.lost() == [("counter", 0)]
