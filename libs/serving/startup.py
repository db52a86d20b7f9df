"""What every process begins with: its log, its open files, its parent, its metrics."""

from __future__ import annotations

import logging
import os
import resource
from importlib import import_module
from typing import TYPE_CHECKING, Final

from libs.serving.process import logs, parent
from libs.serving.process.exits import ExitCause
from libs.serving.process.process_config import ProcessConfig
from libs.serving.telemetry import Telemetry, configure, instance_id
from slatemq._secrets import redacted
from slatemq.variables import unknown_variables

if TYPE_CHECKING:
    from libs.serving.http.server import Exposition

OPEN_FILES_MAX: Final = 65_536
"""More than any process of ours opens."""


def begin(name: str, config: ProcessConfig) -> Exposition | None:
    """Begin a process; returns its metrics, if it has a port for them."""
    logs.configure(name, config.log_level, config.log_format)
    if unknown := unknown_variables(os.environ):
        logging.getLogger(__name__).warning("%s", unknown)
    _allow_open_files()
    if config.parent_pid:
        parent.end_with(config.parent_pid)
    if config.http_port < 0:
        return None
    # Loaded when asked for, since few processes have an HTTP port; and before there is an event
    # loop that would wait for it.
    exposition: Exposition = import_module("libs.serving.http.server").Exposition()
    return exposition


def recorder_of(
    name: str,
    config: ProcessConfig,
    exposition: Exposition | None,
    shard: int | None = None,
    *,
    has_standbys: bool = False,
) -> Telemetry:
    """What records the traces and metrics of a process, by its settings.

    Raises SystemExit where OpenTelemetry's own variables do not permit that.
    """
    instance = instance_id(name, shard, has_standbys=has_standbys)
    readers = [exposition.reader] if exposition is not None else []
    try:
        return configure(name, instance, config.otlp_endpoint, config.trace_sample_percent, readers)
    except Exception as error:
        variables = sorted(name for name in os.environ if name.startswith("OTEL_"))
        if not variables:
            raise
        # The error does not say which.
        why = f"{redacted(str(error))}: correct one of {', '.join(variables)}"
        cause = ExitCause.usage(f"telemetry cannot be set up: {why}")
        cause.log(logging.getLogger(__name__))
        raise SystemExit(cause.code) from None


def _allow_open_files() -> None:
    """Raise the soft limit, which is often 1,024, towards the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
