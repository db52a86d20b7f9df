"""InstanceService, which every process serves: the settings of the instance, and their changes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any, Final

from libs.access.current import ALL_QUEUES, may
from libs.serving.examination import Examiner
from libs.serving.peers.channels import Channels
from libs.serving.peers.elsewhere import PACKAGE, WITH_EVENTS, wrong_service
from libs.serving.peers.topology import TopologyDirectory
from libs.serving.process.config import ServingConfig
from libs.serving.process.instance import InstanceSettings, settings_of_record
from libs.serving.process.settings import check_bounds, settings_of
from libs.storage.database.addresses import parse_root
from libs.storage.errors import CorruptRecord
from libs.storage.objects.instance_records import InstanceRecord, InstanceRecords
from libs.storage.objects.small_objects import Objects
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, Unavailable
from slatemq.models import now_ms
from slatemq.v1 import instance_pb2, instance_pb2_grpc, queue_pb2, queue_pb2_grpc


def changed(before: InstanceSettings, values: Mapping[str, int]) -> InstanceSettings:
    """The settings with these values. Raises InvalidArgument for a value out of bounds."""
    for one in settings_of(InstanceSettings):
        if one.name in values:
            try:
                check_bounds(one.metadata["setting"], values[one.name])
            except ValueError as error:
                raise InvalidArgument(
                    f"settings.{one.name}", f"{error}, not {values[one.name]}"
                ) from None
    return replace(before, **values)


def check_losses(before: InstanceSettings, after: InstanceSettings, *, accept_loss: bool) -> None:
    """Raise FailedPrecondition if something stored or promised would be lost."""
    if after.payload_bytes_max < before.payload_bytes_max:
        raise FailedPrecondition(
            "PAYLOADS_STORED",
            f"{_change('payload_bytes_max', before, after)} is refused: larger payloads may be "
            "stored, and could not be delivered any more. Make a new instance, with a root of its "
            "own, where payloads have to be smaller",
            subject="payload_bytes_max",
        )
    if not accept_loss and (losses := list(_losses(before, after))):
        names = ", ".join(name for name, _ in losses)
        raise FailedPrecondition(
            "CHANGE_LOSES",
            "not changed, as that may lose messages: " + "; ".join(text for _, text in losses),
            subject=names,
        )


def lowers_delay(before: InstanceSettings, after: InstanceSettings) -> bool:
    """Whether queues may have a longer default delay than new ones could."""
    return after.max_message_delay_ms < before.max_message_delay_ms


def _losses(before: InstanceSettings, after: InstanceSettings) -> Iterator[tuple[str, str]]:
    if after.replay_window_s > 0 and not 0 < before.replay_window_s <= after.replay_window_s:
        yield (
            "replay_window_s",
            f"{_change('replay_window_s', before, after)} lets the janitor remove messages that a "
            "new queue could still start with",
        )
    if after.purge_grace_s < before.purge_grace_s:
        yield (
            "purge_grace_s",
            f"{_change('purge_grace_s', before, after)} lets messages be removed before their time "
            "where clocks differ by more than that",
        )


def _change(name: str, before: InstanceSettings, after: InstanceSettings) -> str:
    return f"{name} from {getattr(before, name)} to {getattr(after, name)}"


PAGE_QUEUES: Final = 1000


class InstanceServicer(instance_pb2_grpc.InstanceServiceServicer):
    """Reads and writes the instance's records; keeps nothing."""

    def __init__(
        self,
        objects: Objects,
        directory: TopologyDirectory,
        channels: Channels,
        config: ServingConfig,
        open_without: Sequence[str],
        note: Callable[[], str],
        examiner: Examiner,
        *,
        has_events: bool,
    ) -> None:
        """`open_without`: what this process lacks although other machines can reach it.

        `note` says what holds up its callers.

        Where the process has no events, it changes nothing: who did so would not become one.
        """
        self._records = InstanceRecords(objects)
        self._directory = directory
        self._channels = channels
        self._config = config
        self._open_without = open_without
        self._note = note
        self._examiner = examiner
        self._has_events = has_events

    async def GetInstance(
        self, request: instance_pb2.GetInstanceRequest, context: Any
    ) -> instance_pb2.GetInstanceResponse:
        """What this process is, and the latest record. Raises StoreUnavailable, CorruptRecord."""
        response = instance_pb2.GetInstanceResponse(
            running_number=self._config.instance_number, open_without=self._open_without
        )
        if not request.without_record:
            response.instance.CopyFrom(_to_wire(await self._latest()))
        if may("operate", ALL_QUEUES):
            response.store = parse_root(self._config.root).url
            response.note = self._note()
        else:
            response.instance.ClearField("wal_store")
        return response

    async def UpdateInstance(
        self, request: instance_pb2.UpdateInstanceRequest, context: Any
    ) -> instance_pb2.UpdateInstanceResponse:
        """Write the next record, unless nothing changes. Raises as GetInstance; SlateMQError."""
        if not self._has_events:
            raise await wrong_service(
                PACKAGE + "InstanceService.UpdateInstance", WITH_EVENTS, self._directory
            )
        values = {field.name: value for field, value in request.settings.ListFields()}
        if not values:
            raise InvalidArgument("settings", "name at least one setting to change")
        while True:
            record = await self._latest()
            after = await self._checked(record, values, accept_loss=request.accept_loss)
            if after != settings_of_record(record):
                following = record._replace(
                    number=record.number + 1, written_at_ms=now_ms(), settings=asdict(after)
                )
                if not await self._records.create(following):
                    continue  # Another change came first: judge this one by what that left.
                record = following
            return instance_pb2.UpdateInstanceResponse(instance=_to_wire(record))

    async def ExamineProcess(
        self, request: instance_pb2.ExamineProcessRequest, context: Any
    ) -> instance_pb2.ExamineProcessResponse:
        return await self._examiner.examine()

    async def _latest(self) -> InstanceRecord:
        record = await self._records.latest()
        if record is None:
            # This process has read or written one at its start.
            raise CorruptRecord("instance record", "it was removed from the store: restore it")
        return record

    async def _checked(
        self, record: InstanceRecord, values: Mapping[str, int], *, accept_loss: bool
    ) -> InstanceSettings:
        before = settings_of_record(record)
        after = changed(before, values)
        check_losses(before, after, accept_loss=accept_loss)
        if lowers_delay(before, after):
            await self._check_queues(after.max_message_delay_ms)
        return after

    async def _check_queues(self, delay_ms: int) -> None:
        """Raise FailedPrecondition for a queue whose default delay is longer."""
        async with aclosing(self._queues()) as queues:
            async for queue in queues:
                if queue.default_delay_ms > delay_ms:
                    raise FailedPrecondition(
                        "QUEUES_DELAY_LONGER",
                        f"max_message_delay_ms cannot become {delay_ms}: queue "
                        f"{queue.queue_id!r} delays its messages by {queue.default_delay_ms} "
                        "ms. Update that queue first, or delete it",
                        subject=queue.queue_id,
                    )

    async def _queues(self) -> AsyncGenerator[queue_pb2.Queue, None]:
        topology = await self._directory.read(max_age_ms=0)
        for shard in topology.brokers:
            stub = queue_pb2_grpc.QueueServiceStub(await self._channels.to("broker", shard))
            request = queue_pb2.ListQueuesRequest(page_size=PAGE_QUEUES)
            while True:
                try:
                    with raising_slatemq_errors():
                        page = await stub.ListQueues(request)
                except (Unavailable, DeadlineExceeded) as error:
                    raise Unavailable(
                        f"broker {shard} has to be asked for its queues: {error.message}",
                        reason=error.reason,
                    ) from error
                for queue in page.queues:
                    yield queue
                if not page.next_page_token:
                    break
                request.page_token = page.next_page_token


def _to_wire(record: InstanceRecord) -> instance_pb2.Instance:
    return instance_pb2.Instance(
        number=record.number,
        written_at_ms=record.written_at_ms,
        settings=instance_pb2.InstanceSettings(**asdict(settings_of_record(record))),
        wal_store=parse_root(record.wal_store.url).url if record.wal_store is not None else "",
    )
