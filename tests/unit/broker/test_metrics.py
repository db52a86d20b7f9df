"""What a broker measures of its queues."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from libs.serving.http.server import Exposition
from libs.serving.telemetry import Telemetry, configure
from services.broker.core.shard import Nack
from services.broker.metrics import measure
from tests.unit.broker.core.shards import Rig

Found = dict[str, dict[tuple[object, ...], Any]]


def read(telemetry: Telemetry) -> Found:
    """Values by metric and labels, but for the queue's name."""
    found: Found = {}
    for metric in telemetry.series:
        for value, attributes in metric.points():
            labels = dict(attributes)
            if labels.pop("messaging.destination.name") != "orders":
                continue
            values = found.setdefault(metric.name, {})
            values[tuple(labels[name] for name in sorted(labels))] = value
    return found


async def test_depths_by_state_and_priority_and_failed_attempts_are_measured() -> None:
    telemetry, rig = Telemetry(), Rig()
    measure(telemetry, rig.shard)
    rig.create(max_attempts=1)
    await rig.route([1, 2, 3], priority=7)
    later = rig.now_ms + 1_000_000_000_000
    await rig.route([4], priority=9, visible_at_ms=later)
    nacked, _ = await rig.claim(2, lease_ms=1000)
    await rig.nack(Nack(nacked.token, "no"))
    rig.now_ms += 1000
    await rig.expire()

    found = read(telemetry)

    assert found["slatemq.queue.messages"] == {
        ("available",): 1,
        ("delayed",): 1,
        ("in_flight",): 0,
        ("done",): 0,
        ("failed",): 2,
        ("archived",): 0,
    }
    assert found["slatemq.queue.priority.messages"] == {(7, "available"): 1, (9, "delayed"): 1}
    assert found["slatemq.queue.failed.attempts"] == {("nacked",): 1, ("lease_expired",): 1}
    assert found["slatemq.queue.failed.messages"] == {(): 2}
    assert found["slatemq.queue.expired.messages"] == {(): 0}
    assert found["slatemq.queue.claimed.messages"] == {(): 2}
    assert found["slatemq.queue.redelivered.messages"] == {(): 0}
    assert found["slatemq.queue.quarantined"] == {(): 0}
    (queue,) = rig.shard.queues.values()
    rig.shard.quarantine(queue, "slow", rig.now_ms)
    assert read(telemetry)["slatemq.queue.quarantined"] == {(): 1}
    assert set(found["slatemq.queue.oldest_claimable.age"]) == {()}


async def test_acks_and_messages_that_are_to_be_delivered_again_are_counted() -> None:
    telemetry, rig = Telemetry(), Rig()
    measure(telemetry, rig.shard)
    rig.create(max_attempts=3)
    await rig.route([1, 2, 3], priority=7)
    nacked, _, acked = await rig.claim(3, lease_ms=1000)
    await rig.nack(Nack(nacked.token, "no"))
    await rig.run(lambda: rig.shard.leases.ack([acked.token], rig.now_ms))
    rig.now_ms += 1000
    await rig.expire()

    found = read(telemetry)

    assert found["slatemq.queue.acked.messages"] == {(): 1}
    assert found["slatemq.queue.redelivered.messages"] == {(): 2}


async def test_dead_letters_are_counted_whatever_becomes_of_them() -> None:
    telemetry, rig = Telemetry(), Rig()
    measure(telemetry, rig.shard)
    queue = rig.create(max_attempts=2)
    await rig.route([1])
    (lease,) = await rig.claim(1)
    await rig.nack(Nack(lease.token, "no"))
    # One whose attempts are used up since fewer are allowed fails when it would be claimed
    queue.settings = replace(queue.settings, max_attempts=1)
    assert not await rig.claim(1)

    assert read(telemetry)["slatemq.queue.failed.messages"] == {(): 1}
    queue.failed.purge()
    assert read(telemetry)["slatemq.queue.failed.messages"] == {(): 1}


class Changing:
    """What waits in a queue, read from another thread while the broker changes it."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> object:
        raise self._error


@pytest.mark.parametrize("error", [KeyError(7), IndexError(), RuntimeError("changed size")])
def test_a_queue_that_changes_while_it_is_read_hides_no_other(error: Exception) -> None:
    telemetry, rig = Telemetry(), Rig()
    measure(telemetry, rig.shard)
    rig.create("changing").waiting = Changing(error)  # type: ignore[assignment]
    rig.create("orders")

    depths = read(telemetry)["slatemq.queue.messages"]

    assert depths.keys() >= {("available",), ("delayed",)}


def test_each_of_2_500_queues_has_all_its_series() -> None:
    broker, rig = Scraped(), Rig()
    measure(broker.telemetry, rig.shard)
    for number in range(2_500):
        rig.create(f"queue-{number}")

    assert len(broker.series("slatemq_queue_messages")) == 6 * 2_500
    assert len(broker.series("slatemq_queue_acked_messages_total")) == 2_500


def test_of_400_queues_made_and_deleted_in_turn_the_one_there_is_has_series_and_no_other() -> None:
    broker, rig = Scraped(), Rig()
    measure(broker.telemetry, rig.shard)
    for number in range(400):
        queue = rig.create(f"queue-{number}")

        series = broker.series("slatemq_queue_messages")

        assert [f'"queue-{number}"' in one for one in series] == [True] * 6
        rig.shard.delete_queue(queue)
    assert broker.series("slatemq_queue_messages") == []


class Scraped:
    """Telemetry as `GET /metrics` shows it."""

    def __init__(self) -> None:
        self._exposition = Exposition()
        self.telemetry = configure("broker", "host/broker-0", readers=[self._exposition.reader])

    def series(self, name: str) -> list[str]:
        text = self._exposition.render(self.telemetry.series).decode()
        return [line for line in text.splitlines() if line.startswith(f"{name}{{")]
