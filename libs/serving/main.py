"""The whole of a service's `__main__`, but for its three names.

As in::

from libs.serving.main import main
from services.broker.config import BrokerConfig
from services.broker.service import BrokerService

if __name__ == "__main__":
    main("broker", BrokerConfig, BrokerService)
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from libs.serving import telemetry
from libs.serving.access import refuse_exposure
from libs.serving.process.config import OwnerConfig, ServingConfig, load
from libs.serving.process.exits import EXIT_CLEAN, EXIT_FENCED, ExitCause, FatalError, exit_with
from libs.serving.process.instance import Instance, join_instance, refuse_lost_instance
from libs.serving.process.memory import bound_arenas, calm_collector
from libs.serving.process.shards import opened_root
from libs.serving.process.watchdog import Watchdog
from libs.serving.server import RunningService, Signals, cause_of
from libs.serving.service import Service
from libs.serving.startup import begin, recorder_of
from libs.storage.database.roots import Root
from libs.storage.errors import StorageError
from libs.storage.objects.durability import write_privately
from libs.storage.objects.instance_records import InstanceRecords
from libs.storage.objects.patience import patiently
from libs.storage.objects.restores import refuse_unfinished_restore

try:
    from uvloop import new_event_loop
except ImportError:  # Not on every platform; everything works without, at half the calls/s.
    from asyncio import new_event_loop  # type: ignore[assignment]

if TYPE_CHECKING:
    from libs.serving.http.server import Exposition

C = TypeVar("C", bound=ServingConfig)


def main(
    name: str,
    config_type: type[C],
    build: Callable[[C, telemetry.Telemetry, Root], Service[Any]],
) -> NoReturn:
    """Read the settings, run the service, exit with the code of its end (see `exits`).

    Args:
        name: Of the service, e.g. `broker`.
        config_type: Its settings.
        build: Makes the service, with the settings of the instance in its config; called on the
            running loop. Raises FatalError to name the exit.
    """
    write_privately()
    config = load(config_type, f"python -m services.{name}", sys.argv[1:], os.environ)
    bound_arenas()
    calm_collector()
    exposition = begin(name, config)
    watchdog = Watchdog(config.slow_step_ms) if config.slow_step_ms else None
    make = new_event_loop if watchdog is None else partial(watchdog.new_event_loop, new_event_loop)
    with asyncio.Runner(loop_factory=make) as runner:
        cause = runner.run(_serve(name, config, build, watchdog, exposition))
    logging.shutdown()
    exit_with(config.fenced_exit_code if cause.code == EXIT_FENCED else cause.code)


async def _serve(
    name: str,
    config: C,
    build: Callable[[C, telemetry.Telemetry, Root], Service[Any]],
    watchdog: Watchdog | None,
    exposition: Exposition | None,
) -> ExitCause:
    has_standbys = isinstance(config, OwnerConfig) and config.standby
    shard = getattr(config, "shard", None)
    recorder = recorder_of(name, config, exposition, shard, has_standbys=has_standbys)
    if watchdog is not None:
        watchdog.count = recorder.record_slow_step
    try:
        render = None if exposition is None else partial(exposition.render, recorder.series)
        refuse_exposure(config)  # before it writes anything
        root = opened_root(config.root, config.wal_store)
        with Signals() as signals:  # without a gap: as PID 1 a process without handlers gets none
            config = await _joined(config, root, signals)
            running = RunningService(build(config, recorder, root), config, recorder, render)
            cause = await running.run(signals)
    except FatalError as error:
        cause = error.cause
        cause.log(logging.getLogger(__name__))
    if cause.code == EXIT_CLEAN:  # Otherwise another process waits for this one to end.
        await asyncio.to_thread(recorder.shutdown)
    return cause


async def _join(config: ServingConfig, root: Root) -> Instance:
    """Raises UnfinishedRestore, LostInstance, as `join_instance`, and as Root's of the WALs."""
    with patiently():
        await refuse_unfinished_restore(root.objects, root.url)
        await refuse_lost_instance(root)
        records = InstanceRecords(root.objects)
        instance = await join_instance(records, config.stated, await root.new_wal_store())
        if config.wal_store:
            await root.wal_store()
        return instance


async def _joined(config: C, root: Root, signals: Signals) -> C:
    """The config with the settings of the instance. Raises FatalError."""
    joining = asyncio.ensure_future(_join(config, root))
    try:
        asked = asyncio.ensure_future(signals.first.wait())
        await asyncio.wait([joining, asked], return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if not joining.done():
            joining.cancel()
            raise FatalError(ExitCause.clean(f"{signals.name} while starting"))
        instance = await joining
    except StorageError as error:
        raise FatalError(cause_of(error)) from error
    return dataclasses.replace(config, instance=instance.settings, instance_number=instance.number)
