"""A process that waits for a shard, warm, and takes it when its owner is silent.

The standby asks the owner for its health, at the address of the owner's claim, and nothing of the
store:

    sign      what was seen                                     the owner counts as silent
    LIVES     an answer, serving or not                         never
    STOPS     an answer: it is about to stop                    never; see below
    SILENT    no answer in time                                 after 4 looks, 2 s
    GONE      no process listens, or another one answers        after 2 looks, 0.2 s apart

An owner that stops gives its shard free once its database is closed, which a standby looks for
while it finds it gone. Until then it has five times as many looks.

An answer has the owner's clock, too: a standby whose own differs says so in its log, since delays
and leases of the shard go by that one once it has the shard.

An owner may be silent and live, cut off or standing still. Taking its shard is safe: SlateDB fences
it, and its claim is lost. It does not come back by itself: a process that is started again as a
standby has a new name, and waits. Of several standbys the one gets the shard that makes the next
claim, and the others watch that one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from typing import Any, Final, NamedTuple

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.metrics import Meter, Observation

from libs.serving.peers.topology import TopologyDirectory
from libs.serving.process.config import OwnerConfig
from libs.serving.process.exits import ExitCause, FatalError
from libs.serving.process.health import CLOCK_KEY, REASON_KEY, STOPPING, owner_health
from libs.storage.errors import StorageError
from libs.storage.objects.instance_records import InstanceRecords
from libs.storage.objects.shard_owners import Owner, OwnerRecord, ShardOwners
from libs.storage.objects.small_objects import Objects
from slatemq._clocks import SKEW_MS_MAX, skew_of
from slatemq.models import now_ms

log = logging.getLogger(__name__)

LOOK_S: Final = 0.5
"""From the start of a look at the owner to that of the next, and how long it has to answer. A look
costs both processes less than a millisecond."""

GONE_LOOK_S: Final = 0.2
"""From a look that found no process to the next one."""

SILENT_LOOKS: Final = 4
"""Looks without an answer after which the owner counts as silent; one that found no process counts
twice. An owner's event loop that stands still for less than 2 s loses nothing."""

STOPPING_FACTOR: Final = 5
"""An owner that has said that it stops has as many times the looks to close its database."""

STORE_AGAIN_S: Final = 1.0
"""From a failed look into the store to the next one."""

NAME_BYTES: Final = 8


class Sign(Enum):
    """What a look at the owner has shown.

    The value says for how many looks without an answer it counts; those of an answer only differ.
    """

    LIVES = 0
    STOPS = -1
    SILENT = 1
    GONE = 2


def owner_name_of(config: OwnerConfig) -> str:
    """The name under which a process claims its shard: of one life of it where it stands by."""
    if not config.standby:
        return config.owner_name
    return f"{config.owner_name}.{secrets.token_hex(NAME_BYTES)}".removeprefix(".")


class OwnerWatch:
    """Looks at one owner.

    Attributes:
        is_silent: Whether the looks so far show that it may be replaced.
        skew_ms: By how much at least this machine's clock is ahead of the owner's; negative:
            behind.
    """

    def __init__(self, channel: grpc.aio.Channel, address: str, health_name: str) -> None:
        """At `address`, which `channel` leads to; `health_name` as of `owner_health`."""
        self._stub: Any = health_pb2_grpc.HealthStub(channel)
        self._address = address
        self._request = health_pb2.HealthCheckRequest(service=health_name)
        self._stops = False
        self._counted = 0
        self.is_silent = False
        self.skew_ms = 0

    async def look(self) -> Sign:
        """Look once, for `LOOK_S` at most."""
        began = time.monotonic()
        sign = await self._sign()
        if time.monotonic() - began > 2 * LOOK_S:
            return Sign.LIVES  # For all we know: this process stood still itself.
        if sign in (Sign.LIVES, Sign.STOPS):
            self._stops, self._counted = sign is Sign.STOPS, 0
        else:
            self._counted += sign.value
        looks = SILENT_LOOKS * (STOPPING_FACTOR if self._stops else 1)
        self.is_silent = self._counted >= looks
        return sign

    async def _sign(self) -> Sign:
        sent_ms = now_ms()
        call = self._stub.Check(self._request, timeout=LOOK_S)
        try:
            await call
            metadata = dict(await call.trailing_metadata() or ())
        except grpc.RpcError as error:
            code: Any = error.code()
            if code is grpc.StatusCode.NOT_FOUND:
                return Sign.GONE
            if code is grpc.StatusCode.UNAVAILABLE and await self._is_refused():
                return Sign.GONE
            return Sign.SILENT
        if (clock := metadata.get(CLOCK_KEY, "")).isdecimal():
            self.skew_ms = -skew_of(int(clock), sent_ms)
        return Sign.STOPS if metadata.get(REASON_KEY) == STOPPING else Sign.LIVES

    async def _is_refused(self) -> bool:
        """Whether the owner's machine answers that no process listens."""
        return await listens(self._address, LOOK_S / 2) is False


async def listens(address: str, timeout_s: float) -> bool | None:
    """Whether a process listens at an address; None where nothing answers."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return False
    except (OSError, ValueError, TimeoutError):
        return None
    writer.close()
    with suppress(OSError):  # It has closed the connection first.
        await writer.wait_closed()
    return True


class _Claim(NamedTuple):
    """The valid claim, and where its owner is; no address where it has none."""

    record: OwnerRecord
    address: str


class Standby:
    """Waits for one shard.

    Attributes:
        is_waiting: Whether it waits now.
        has_taken: Whether it has taken the shard.
    """

    def __init__(
        self,
        shard: tuple[str, int],
        owner: Owner,
        objects: Objects,
        directory: TopologyDirectory,
        open_channel: Callable[[str], grpc.aio.Channel],
        instance_number: int,
    ) -> None:
        """Wait for the shard of a service, such as `("broker", 0)`, as `owner`.

        The owner's name is as of `owner_name_of`. `directory` has the addresses of owners without a
        name, `open_channel` leads to an address, and `instance_number` is of the instance record
        that this process was started with.
        """
        self.is_waiting = self.has_taken = self._found_silent = False
        self._shard = shard
        self._database = "{}/{}".format(*shard)
        self._owner = owner
        self._owners = ShardOwners(objects, self._database)
        self._records = InstanceRecords(objects)
        self._directory = directory
        self._open_channel = open_channel
        self._instance_number = instance_number

    @property
    def shard(self) -> int:
        return self._shard[1]

    @property
    def has_replaced(self) -> bool:
        """Whether it took the shard from an owner that was silent."""
        return self.has_taken and self._found_silent

    async def wait(self) -> None:
        """Return once the shard is this process's; wait for as long as its owner lives.

        Raises FatalError where the settings of the instance have changed since this process started
        and the shard is to be taken.
        """
        self.is_waiting = True
        while not self.has_taken:
            try:
                self.has_taken = await self._watch_and_take()
            except StorageError as error:
                log.warning("waiting as a standby: the store cannot be used: %s", error)
                await asyncio.sleep(STORE_AGAIN_S)
        self.is_waiting = False

    async def give_free(self) -> None:
        """Let another standby have the shard, whose database is closed. Raises nothing."""
        if self.has_taken:
            try:
                await self._owners.give_free(self._owner.name)
            except StorageError as error:
                log.warning("the shard has not been given free: %s", error)

    async def _watch_and_take(self) -> bool:
        """Wait until the owner of now is silent. Returns whether its shard is this process's."""
        claim = await self._claim()
        # An earlier `take` may have failed behind its claim. This process answers at that address:
        # it would wait for itself.
        is_own = claim.record.owner.name == self._owner.name
        if claim.address and not is_own:
            facts = {"owner": claim.record.owner.name, "owner_address": claim.address}
            log.info("waiting as a standby", extra=facts)
            if not claim.record.owner.name:
                log.warning(
                    "the owner of the shard has no name: give it --standby too, or it takes the "
                    "shard back whenever it is started again"
                )
            await self._until_silent(claim)
            if await self._claim() != claim:
                return False
            log.warning("the owner of the shard is silent: taking the shard", extra=facts)
        await self._check_instance()
        if is_own:
            return True
        self._found_silent = bool(claim.address)
        return await self._owners.take(self._owner, claim.record)

    async def _until_silent(self, claim: _Claim) -> None:
        """Return once the owner may be replaced, or has given its shard free."""
        channel = self._open_channel(claim.address)
        health_name = owner_health(self._database, claim.record.owner.name)
        watch = OwnerWatch(channel, claim.address, health_name)
        is_off = False
        try:
            while not watch.is_silent:
                began = time.monotonic()
                sign = await watch.look()
                is_off = _note_skew(watch.skew_ms, is_off)
                if sign is Sign.GONE:
                    if (await self._owners.latest()) != claim.record:
                        return
                    await asyncio.sleep(GONE_LOOK_S)
                else:
                    await asyncio.sleep(LOOK_S - (time.monotonic() - began))
        finally:
            await channel.close()

    async def _claim(self) -> _Claim:
        record = await self._owners.latest()
        if record.damage:
            log.warning("the claim of the shard is damaged: %s", record.damage)
        address = record.owner.address
        if not record.owner.name and not record.is_free:
            # A process without a name makes no claim; the topology has it once it serves.
            address = (await self._directory.read(0)).address(*self._shard) or ""
        return _Claim(record, address)

    async def _check_instance(self) -> None:
        record = await self._records.latest()
        if record is not None and record.number != self._instance_number:
            raise FatalError(
                ExitCause.failed(
                    "the settings of the instance have changed since this standby was started: it "
                    "has to be started again"
                )
            )


def _note_skew(skew_ms: int, was_off: bool) -> bool:
    """Log where the clocks begin or cease to differ; returns whether they do."""
    is_off = abs(skew_ms) > SKEW_MS_MAX
    if is_off and not was_off:
        ahead = "ahead of" if skew_ms > 0 else "behind"
        log.warning(
            "the clock of this standby is %.1f s %s that of the owner: correct the one that is "
            "wrong, as the times of the shard go by this one once it has taken the shard",
            abs(skew_ms) / 1000,
            ahead,
        )
    if was_off and not is_off:
        log.warning("the clocks of this standby and of the owner agree again")
    return is_off


def measure_standby(meter: Meter, standby: Callable[[], Standby | None]) -> None:
    """Registers what a process does as a standby; a process that is not one has no values."""

    def observe(of: Callable[[Standby], bool]) -> Iterable[Observation]:
        known = standby()
        if known is None:
            return []
        return [Observation(int(of(known)), {"slatemq.shard": known.shard})]

    meter.create_observable_gauge(
        "slatemq.standby.waiting",
        callbacks=[lambda _: observe(lambda known: known.is_waiting)],
        description="1 while the process waits as a standby for its shard, 0 once it owns it",
    )
    meter.create_observable_counter(
        "slatemq.standby.takeovers",
        callbacks=[lambda _: observe(lambda known: known.has_replaced)],
        description="Owners that the process has replaced since they were silent: 0 or 1",
    )
