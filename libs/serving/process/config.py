"""Settings: frozen dataclasses, read once at start from flags and environment.

A service declares its settings by extending `ServingConfig`::

    @dataclass(frozen=True, kw_only=True)
    class BrokerConfig(ServingConfig):
        shard: int = setting("Number of this broker's shard.", default=0, minimum=0)
        lease_ms: int = setting("Lease of a claim that asks for none, in ms.", default=30_000)

and `load` gives each one a flag (`--lease-ms`), a variable (`SLATEMQ_LEASE_MS`) and a line in
`--help`. A flag goes before the variable, and that before the default.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from libs.serving import limits
from libs.serving.process.event_settings import read_queue_settings
from libs.serving.process.exits import EXIT_FENCED
from slatemq.errors import InvalidArgument
from slatemq.variables import is_service_link, unknown_variables

if TYPE_CHECKING:
    from libs.events.settings import QueueSettings

ENVIRONMENT_PREFIX = "SLATEMQ_"

C = TypeVar("C", bound="ServingConfig")

_KINDS: Final[dict[str, type]] = {kind.__name__: kind for kind in (str, int, bool)}


class Scope(enum.Enum):
    """Where a setting may differ."""

    PROCESS = "may differ per process"
    INSTANCE = "the same for all processes, for the life of the instance"


@dataclass(frozen=True)
class Setting:
    """What a config field says of itself, beyond its name, type and default."""

    text: str
    scope: Scope
    minimum: int | None
    maximum: int | None
    choices: tuple[str, ...]


def setting(
    text: str,
    *,
    default: Any = dataclasses.MISSING,
    scope: Scope = Scope.PROCESS,
    minimum: int | None = None,
    maximum: int | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field of a config dataclass, of type str, int or bool; required when it has no default.

    Args:
        text: What it does, with its unit; shown by `--help`.
        default: Its value when neither flag nor variable gives one.
        scope: Whether it may differ between the processes of one instance.
        minimum: The least value of an int.
        maximum: The greatest value of an int.
        choices: The values allowed for a str; none means any.
    """
    told = Setting(text, scope, minimum, maximum, choices)
    return dataclasses.field(default=default, kw_only=True, metadata={"setting": told})


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """The settings that every service has.

    Attributes:
        queue: The `queue` section of the file `config` and its variables; None in direct mode.
    """

    queue: QueueSettings | None = None

    root: str = setting(
        "URL of the object store folder that holds all data: file:///path, memory:///, "
        "s3://bucket/prefix?region=…, gs://bucket/prefix, az://container/prefix.",
        scope=Scope.INSTANCE,
    )
    config: str = setting(
        "YAML file with the section `queue`, the settings of event queues; empty reads none.",
        default="",
    )
    host: str = setting("Address to listen on.", default="127.0.0.1")
    port: int = setting(
        "Port to listen on; 0 takes a free one.", default=0, minimum=0, maximum=65_535
    )
    http_port: int = setting(
        "Port for HTTP on the same address: GET /health, GET /metrics; 0 takes a free one, -1 "
        "opens none.",
        default=-1,
        minimum=-1,
        maximum=65_535,
    )
    advertised_address: str = setting(
        "host:port under which clients reach this process; empty means the one it listens on.",
        default="",
    )
    peer_address: str = setting(
        "host:port under which the other services reach this process, where that differs from "
        "what clients need (containers); empty means the advertised one.",
        default="",
    )
    parent_pid: int = setting(
        "Process to end with: once it is gone, this one is killed; 0 means none. For supervisors "
        "that may be killed themselves.",
        default=0,
        minimum=0,
    )
    ready_file: str = setting(
        'File to write {"address": "host:port"} to once serving, with "http_address" where there '
        "is an HTTP port; empty writes none.",
        default="",
    )
    fenced_exit_code: int = setting(
        "Exit code once another process owns the shard, after which nobody may start this one "
        "again; 0 for supervisors that start again whatever fails (Docker's on-failure).",
        default=EXIT_FENCED,
        minimum=0,
        maximum=255,
    )
    drain_ms: int = setting(
        "How long calls in flight may go on after SIGTERM, in ms.", default=10_000, minimum=0
    )
    concurrent_calls_max: int = setting(
        "Calls in flight at once; over it callers get RESOURCE_EXHAUSTED.",
        default=limits.ADMISSION_CALLS_MAX,
        minimum=1,
    )
    payload_bytes_max: int = setting(
        "Largest payload of a message, in bytes; message size limits follow from it.",
        default=limits.PAYLOAD_BYTES_MAX,
        scope=Scope.INSTANCE,
        minimum=1,
        maximum=limits.PAYLOAD_BYTES_CEILING,
    )
    log_level: str = setting(
        "Least severity that is logged.",
        default="info",
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = setting(
        "Form of a log line, on stderr.", default="text", choices=("text", "json")
    )
    slow_step_ms: int = setting(
        "A step of the event loop that takes more processor time than this, in ms, is logged with "
        "its stack, since all calls wait for its end; 0 turns this off.",
        default=50,
        minimum=0,
    )
    otlp_endpoint: str = setting(
        "URL to send OpenTelemetry traces and metrics to (OTLP over gRPC), such as "
        "http://127.0.0.1:4317; empty sends nothing.",
        default="",
    )
    trace_sample_percent: int = setting(
        "Share of traces that are recorded, in percent, of those that begin here.",
        default=100,
        minimum=0,
        maximum=100,
    )


def purge_grace_setting() -> Any:
    """The field `purge_grace_s` of every service that removes what it owns."""
    return setting(
        "How long something must have been over, by this process's clock, before it is removed for "
        "good, in seconds: more than clocks of the instance's machines differ.",
        default=60,
        scope=Scope.INSTANCE,
        minimum=0,
        maximum=24 * 3600,
    )


def load(config_type: type[C], program: str, argv: Sequence[str], environ: Mapping[str, str]) -> C:
    """Read the settings of `config_type`.

    Args:
        config_type: A ServingConfig whose fields are made with `setting`.
        program: How the process was called, for `--help`.
        argv: The arguments, without the program's name.
        environ: The environment.

    Raises:
        SystemExit: 0 after `--help`; 2 with a message on stderr when a setting is wrong.
    """
    fields = settings_of(config_type)
    parser = argparse.ArgumentParser(prog=program, description=config_type.__doc__)
    for field in fields:
        parser.add_argument(
            _flag(field.name),
            default=None,
            metavar=kind_of(field).__name__.upper(),
            help=_help(field).replace("%", "%%"),
        )
    given = vars(parser.parse_args(argv))

    def refuse(problem: str) -> NoReturn:
        # A misspelt variable may be the reason.
        parser.error("\n".join(filter(None, (problem, unknown_variables(environ)))))

    values: dict[str, Any] = {}
    for field in fields:
        source, text = _flag(field.name), given[field.name]
        if text is None:
            source = _variable(field.name)
            text = environ.get(source)
            if text is not None and is_service_link(source, text):
                text = None
        if text is None:
            if field.default is dataclasses.MISSING:
                refuse(f"{_flag(field.name)} or {source} is required")
            continue
        try:
            values[field.name] = _parse(kind_of(field), field.metadata["setting"], text)
        except ValueError as error:
            refuse(f"{source}: {error}, not {text!r}")
    try:
        queue = read_queue_settings(values.get("config", ""), environ)
    except InvalidArgument as error:
        refuse(error.message)
    return config_type(queue=queue, **values)


def settings_of(config_type: type[ServingConfig]) -> list[dataclasses.Field[Any]]:
    """The fields that are made with `setting`."""
    return [field for field in dataclasses.fields(config_type) if "setting" in field.metadata]


def kind_of(field: dataclasses.Field[Any]) -> type:
    """The type of a setting: str, int or bool."""
    name = field.type if isinstance(field.type, str) else field.type.__name__
    if name not in _KINDS:
        raise TypeError(f"a setting is str, int or bool, not {name}")
    return _KINDS[name]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def _help(field: dataclasses.Field[Any]) -> str:
    told: Setting = field.metadata["setting"]
    facts = [_variable(field.name)]
    if told.choices:
        facts.append("one of " + ", ".join(told.choices))
    if field.default is dataclasses.MISSING:
        facts.append("required")
    elif field.default != "":
        facts.append(f"default {field.default}")
    facts.append(told.scope.value)
    return f"{told.text} [{'; '.join(facts)}]"


def _parse(kind: type, told: Setting, text: str) -> str | int | bool:
    if kind is bool:
        return _parse_bool(text)
    if kind is int:
        return _parse_int(told, text)
    if told.choices and text not in told.choices:
        raise ValueError("must be one of " + ", ".join(told.choices))
    return text


def _parse_bool(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError("must be true or false")


def _parse_int(told: Setting, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ValueError("must be a whole number") from None
    if told.minimum is not None and value < told.minimum:
        raise ValueError(f"must be at least {told.minimum}")
    if told.maximum is not None and value > told.maximum:
        raise ValueError(f"must be at most {told.maximum}")
    return value
