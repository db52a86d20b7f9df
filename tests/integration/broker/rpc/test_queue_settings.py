"""The settings of delivery over the wire: kept, changed, and back at their defaults."""

from __future__ import annotations

from typing import Any

from slatemq.v1 import queue_pb2
from tests.integration.broker.queue_calls import get, update
from tests.integration.broker.rig import NO_BACKOFF, Disk, memory_root, refusal, running
from tests.manual_clock import ManualClock

Backoff = queue_pb2.Backoff

ALL: dict[str, Any] = {
    "default_delay_ms": 900_000,
    "backoff": Backoff(
        kind=Backoff.KIND_EXPONENTIAL, initial_ms=100, max_ms=60_000, multiplier=1.5, jitter=0.1
    ),
    "fallback_priority": 0,
    "max_total_lease_ms": 604_800_000,
    "failed_retention_s": 4_294_967_295,
}


async def test_all_settings_survive_a_restart_and_go_back_to_their_defaults() -> None:
    disk = Disk()
    root, clock = memory_root(disk), ManualClock()
    async with running(root, clock, disk=disk) as rig:
        created = await rig.create(**ALL)
        assert {name: getattr(created, name) for name in ALL} == ALL
    async with running(root, clock, disk=disk) as rig:
        kept = await get(rig)
        assert {name: getattr(kept, name) for name in ALL} == ALL

        plain = await rig.create("plain", backoff=None)
        reset = await update(rig, list(ALL))
        assert {name: getattr(reset, name) for name in ALL} == {
            name: getattr(plain, name) for name in ALL
        }
        assert reset.backoff.kind == Backoff.KIND_EXPONENTIAL


async def test_a_backoff_is_reported_with_its_defaults() -> None:
    async with running() as rig:
        asked = Backoff(kind=Backoff.KIND_LINEAR, initial_ms=5)
        backoff = (await rig.create(backoff=asked)).backoff
        assert backoff == Backoff(kind=Backoff.KIND_LINEAR, initial_ms=5, max_ms=43_200_000)
        assert (await update(rig, ["backoff"], backoff=backoff)).backoff == backoff
        assert (await update(rig, ["backoff"], backoff=NO_BACKOFF)).backoff == NO_BACKOFF


async def test_a_multiplier_is_for_exponential_backoffs_only() -> None:
    async with running() as rig:
        for kind in (Backoff.KIND_FIXED, Backoff.KIND_LINEAR):
            wrong = Backoff(kind=kind, initial_ms=5, multiplier=2)
            assert (await refusal(rig.create(backoff=wrong)))[2] == "queue.backoff.multiplier"


async def test_the_longest_lease_is_no_longer_than_the_longest_total_lease() -> None:
    async with running() as rig:
        created = await rig.create(max_total_lease_ms=5000)
        assert (created.max_lease_ms, created.lease_ms) == (5000, 5000)

        await rig.create("b", lease_ms=5000, max_lease_ms=10_000)
        result = await refusal(update(rig, ["max_total_lease_ms"], "b", max_total_lease_ms=9999))
        assert result[2] == "queue.max_total_lease_ms"
        paths = ["max_lease_ms", "max_total_lease_ms"]
        assert (await update(rig, paths, "b", max_total_lease_ms=9999)).max_lease_ms == 9999


async def test_the_longest_delay_is_a_setting_of_the_instance() -> None:
    async with running(settings={"max_message_delay_ms": 3_155_760_000_000}) as rig:
        created = await rig.create(default_delay_ms=3_155_760_000_000)
        assert created.default_delay_ms == 3_155_760_000_000
        result = await refusal(rig.create("b", default_delay_ms=3_155_760_000_001))
        assert result[2] == "queue.default_delay_ms"
