"""The settings of every process, and how settings are read from flags and environment.

The console declares its settings by extending `ProcessConfig`, the scaler `MutualTlsConfig`, a
service `ServingConfig` (`libs.serving.process.config`). Each setting has a flag (`--drain-ms`), a
variable (`SLATEMQ_DRAIN_MS`) and a line in `--help`; a secret has the variable alone. A flag goes
before the variable, and that before the default.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from libs.serving.process.settings import (
    Setting,
    flag_of,
    has_flag,
    kind_of,
    parse,
    setting,
    settings_of,
    variable_of,
)
from slatemq.credentials import is_loopback
from slatemq.variables import is_service_link, unknown_variables

C = TypeVar("C", bound="ProcessConfig")

Fields = Sequence[dataclasses.Field[Any]]

OWN = "may differ per process"


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """The settings that every process has."""

    host: str = setting("Address to listen on.", default="127.0.0.1")
    port: int = setting(
        "Port to listen on; 0 takes a free one.", default=0, minimum=0, maximum=65_535
    )
    http_port: int = setting(
        "Port for HTTP on the same address: GET /health, GET /metrics; with TLS where the process "
        "has a certificate. 0 takes a free one, -1 opens none.",
        default=-1,
        minimum=-1,
        maximum=65_535,
    )
    tls_cert: str = setting(
        "File with this process's certificate and those between it and its authority, in PEM; "
        "empty serves without TLS. Files of TLS are read again when they change.",
        default="",
    )
    tls_key: str = setting("File with the private key of that certificate, in PEM.", default="")
    tls_ca: str = setting(
        "File with the authorities that the certificates of the other services, and of clients "
        "that have one, must be signed by, in PEM.",
        default="",
    )
    insecure: bool = setting(
        "Listen on addresses of other machines without TLS or without a policy all the same.",
        default=False,
    )
    parent_pid: int = setting(
        "Process to end with: once it is gone, this one is killed; 0 means none. For supervisors "
        "that may be killed themselves.",
        default=0,
        minimum=0,
    )
    ready_file: str = setting(
        'File to write {"address": "host:port", "peer_address": …} to once serving, with '
        '"http_address" where there is an HTTP port; empty writes none.',
        default="",
    )
    drain_ms: int = setting(
        "How long calls in flight may go on after SIGTERM, in ms.", default=10_000, minimum=0
    )
    log_level: str = setting(
        "Least severity that is logged; acts (logger slatemq.audit) and the warning of an open "
        "process are logged at each level.",
        default="info",
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = setting(
        "Form of a log line, on stderr.", default="text", choices=("text", "json")
    )
    otlp_endpoint: str = setting(
        "URL to send OpenTelemetry traces and metrics to (OTLP over gRPC), such as "
        "http://127.0.0.1:4317, without a login; empty sends nothing.",
        default="",
    )
    trace_sample_percent: int = setting(
        "Share of traces that are recorded, in percent, of those that begin here.",
        default=100,
        minimum=0,
        maximum=100,
    )

    @property
    def address_host(self) -> str:
        """The host as a part of `host:port`: an IPv6 address has brackets there."""
        bare = self.host.strip("[]")
        return f"[{bare}]" if ":" in bare else bare

    @property
    def is_exposed(self) -> bool:
        """Whether other machines reach it."""
        return not is_loopback(f"{self.address_host}:0")


@dataclass(frozen=True, kw_only=True)
class MutualTlsConfig(ProcessConfig):
    """The settings of a process whose callers have certificates: a service, or the scaler."""

    tls_crl: str = setting(
        "File with revocation lists (CRLs) of the authorities of --tls-ca, in PEM: certificates "
        "that they name are refused. Read again when it changes; empty reads none.",
        default="",
    )


def load_own(
    config_type: type[C], program: str, argv: Sequence[str], environ: Mapping[str, str]
) -> C:
    """The config of a process that has no settings of the instance; as `SettingsReader` for errors.

    Args:
        config_type: A ProcessConfig whose fields are made with `setting`.
        program: How the process was called, for `--help`.
        argv: The arguments, without the program's name.
        environ: The environment.
    """
    reader = SettingsReader(config_type, program, [(settings_of(config_type), OWN)], environ)
    return config_type(**reader.read(argv))


class SettingsReader:
    """Reads groups of settings.

    Attributes:
        sources: The flag or variable that stated each setting, once read.
    """

    def __init__(
        self,
        config_type: type,
        program: str,
        groups: Sequence[tuple[Fields, str]],
        environ: Mapping[str, str],
    ) -> None:
        """Each group of fields comes with what `--help` says of its scope."""
        self.sources: dict[str, str] = {}
        self._environ = environ
        self._fields = [one for group, _ in groups for one in group]
        self._parser = argparse.ArgumentParser(
            prog=program, description=config_type.__doc__, allow_abbrev=False
        )
        for group, scope in groups:
            for one in filter(has_flag, group):
                is_switch = kind_of(one) is bool
                self._parser.add_argument(
                    flag_of(one.name),
                    default=None,
                    metavar="true|false" if is_switch else kind_of(one).__name__.upper(),
                    nargs="?" if is_switch else None,
                    const="true" if is_switch else None,
                    help=_help(one, scope).replace("%", "%%"),
                )

    def refuse(self, problem: str) -> NoReturn:
        """Raises SystemExit: 2, with the problem on stderr."""
        # A misspelt variable may be the reason.
        self._parser.error("\n".join(filter(None, (problem, unknown_variables(self._environ)))))

    def read(self, argv: Sequence[str]) -> dict[str, Any]:
        """The values that are stated.

        Raises:
            SystemExit: 0 after `--help`; 2 with a message on stderr when a setting is wrong.
        """
        given = self._parse(argv)
        values: dict[str, Any] = {}
        for one in self._fields:
            source, text = flag_of(one.name), given.get(one.name)
            if text is None:
                source = variable_of(one.name)
                text = self._environ.get(source)
                if text is not None and is_service_link(source, text):
                    text = None
            if text is None:
                if one.default is dataclasses.MISSING:
                    self.refuse(f"{flag_of(one.name)} or {source} is required")
                continue
            if one.name == "otlp_endpoint" and (problem := _problem_of_collector(text)):
                self.refuse(f"{source}: {problem}")
            try:
                values[one.name] = parse(one, text)
            except ValueError as error:
                self.refuse(f"{source}: {error}, not {text!r}")
            self.sources[one.name] = source
        return values

    def _parse(self, argv: Sequence[str]) -> dict[str, Any]:
        given, unknown = self._parser.parse_known_args(argv)
        # Without their values: errors go to the log, and one may be a secret.
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        for one in self._fields:
            if flag_of(one.name) in flags and not has_flag(one):
                variable = variable_of(one.name)
                self.refuse(f"{flag_of(one.name)}: a secret has no flag: set {variable}")
        if unknown:
            self.refuse(f"unrecognized arguments: {' '.join(flags or unknown)}")
        return vars(given)


def _problem_of_collector(url: str) -> str:
    """What is wrong with the URL of a collector, without it; empty where nothing is."""
    if "@" in url:  # Its exporter would log it as a part of the host.
        return "takes no login: OTEL_EXPORTER_OTLP_HEADERS can have one"
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_url = False
    return "" if is_url or not url else "must be a URL such as http://127.0.0.1:4317"


def _help(one: dataclasses.Field[Any], scope: str) -> str:
    described: Setting = one.metadata["setting"]
    facts = [variable_of(one.name)]
    if described.choices:
        facts.append("one of " + ", ".join(described.choices))
    if one.default is dataclasses.MISSING:
        facts.append("required")
    elif one.default != "":
        facts.append(f"default {one.default}")
    facts.append(scope)
    return f"{described.text} [{'; '.join(facts)}]"
