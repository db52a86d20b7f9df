"""What protects the ports of a process: TLS, the policy, and who the services are.

A process on loopback may go without; any other one needs TLS and a policy, or says `--insecure`.
"""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libs.serving.live_series import Point
from libs.serving.process.config import ServingConfig
from libs.serving.process.exits import FatalError
from libs.serving.process.healthprobe import tls_files
from libs.serving.process.process_config import MutualTlsConfig
from libs.serving.process.settings import flag_of, variable_of
from libs.serving.requests.auditing import Auditor
from libs.serving.requests.doors import ClientDoor, ServiceDoor
from libs.serving.telemetry import Telemetry
from libs.serving.tls import (
    ServerTls,
    ServiceFiles,
    certificate_files,
    https_context,
    setting_of,
)
from slatemq._rpc.tls import ChannelTls
from slatemq.errors import InvalidArgument

if TYPE_CHECKING:
    from libs.access.callers import Callers
    from libs.access.quotas import Usage
    from libs.access.reloading import ReloadedFile
    from libs.serving.revocations import Revocations

TLS_SETTINGS = ("tls_ca", "tls_cert", "tls_key", "service_identity")
TLS_VARIABLES = tuple(map(variable_of, TLS_SETTINGS))


@dataclass(frozen=True)
class Protection:
    """How the ports of a process are protected.

    Attributes:
        client_door, service_door: What judges the calls of each port.
        client_tls, service_tls, http_tls: The TLS of each port; None: none.
        callers: The callers of a policy, whose files are to be watched; None: no policy.
        revoked: The file of revoked certificates, which is to be watched; None: there is none.
        warning: What is not protected although it seems so, or others can reach it; empty:
            nothing.
    """

    client_door: ClientDoor
    service_door: ServiceDoor
    client_tls: ServerTls | None
    service_tls: ServerTls | None
    http_tls: ssl.SSLContext | None
    callers: Callers | None
    revoked: Revocations | None
    warning: str

    @property
    def note(self) -> str:
        """Which files of access are refused as they are now; empty: none.

        Not why: what is wrong with a file of tokens may have a part of it.
        """
        files: list[ReloadedFile[Any]] = list(self.callers.files) if self.callers else []
        if self.revoked is not None:
            files.append(self.revoked)
        refused = [file.file for file in files if file.problem]
        if self.client_tls is not None and self.client_tls.refused is not None:
            refused.append(self.client_tls.refused)  # Those of all ports, and of channels.
        return "; ".join(
            f"{file.name!a} is refused as it is now, and the version before stays in force: "
            "the log says why"
            for file in refused
        )


def open_without(config: ServingConfig) -> list[str]:
    """What a process lacks although other machines can reach it: `TLS` or `policy`, for example."""
    if not config.is_exposed:
        return []
    stated = {"TLS": config.tls_cert, "policy": config.access_policy}
    return [name for name, file in stated.items() if not file]


def refuse_exposure(config: ServingConfig) -> None:
    """Raise FatalError if the process would be open to other machines."""
    if config.insecure:
        return
    if lacking := open_without(config):
        raise _unusable(
            InvalidArgument(
                "host",
                f"other machines can reach {config.host}, and there is no "
                f"{' and no '.join(lacking)}: set --tls-cert, --tls-key, --tls-ca and "
                f"--access-policy (docs/how-to/secure.md), listen on 127.0.0.1, or say --insecure",
            )
        )


def protection_of(config: ServingConfig, auditor: Auditor) -> Protection:
    """Read the files that the settings name.

    Raises:
        FatalError: A file is not usable.
    """
    try:
        return _protection(config, auditor)
    except InvalidArgument as error:
        raise _unusable(error) from error


def _protection(config: ServingConfig, auditor: Auditor) -> Protection:
    lacking = open_without(config)
    client_tls = service_tls_ = None
    files = certificate_files(config, config.service_identity)
    if files is not None:
        if not config.service_identity:
            # Else every client with a certificate could make the calls of services.
            raise InvalidArgument(
                "service_identity", "must be set: a DNS name that every service's certificate has"
            )
        needs_certificate = config.client_certificates == "required"
        client_tls = ServerTls(files, needs_client_certificate=needs_certificate)
        service_tls_ = ServerTls(files, needs_client_certificate=True)
    callers = _callers(config)
    revoked = revoked_certificates(config)
    return Protection(
        ClientDoor(callers, auditor, revoked, has_tls=files is not None),
        ServiceDoor(config.service_identity if files is not None else "", revoked, auditor),
        client_tls,
        service_tls_,
        https_context(files) if config.http_port >= 0 else None,
        callers,
        revoked,
        "; ".join(_unprotected(lacking, has_open_peers=callers is not None and files is None)),
    )


def _unprotected(lacking: Sequence[str], *, has_open_peers: bool) -> Iterator[str]:
    if lacking:
        yield f"open to other machines without {' and '.join(lacking)}"
    if has_open_peers:
        yield (
            "the policy does not hold on the port for services, since without TLS nothing proves "
            "who is one: every program that reaches it can make their calls"
        )


def revoked_certificates(
    config: MutualTlsConfig,
) -> Revocations | None:
    """The file of revoked certificates, which is to be watched; None: there is none.

    Raises:
        InvalidArgument: A file is not usable.
    """
    if not config.tls_crl:
        return None
    if not config.tls_ca:
        raise InvalidArgument("tls_crl", "has no effect without --tls-ca, --tls-cert and --tls-key")
    # Loaded where there are lists, with the library for certificates.
    module = import_module("libs.serving.revocations")
    revoked: Revocations = module.revocations_of(Path(config.tls_crl), Path(config.tls_ca))
    return revoked


def measure_usage(usage: Usage, telemetry: Telemetry) -> None:
    """Give metrics of what principals take, and of what is refused to them."""

    def points(counts: Counter[tuple[str, str]]) -> Iterator[Point]:
        for (limit, entry), count in list(counts.items()):
            yield count, {"slatemq.access.limit": limit, "slatemq.access.entry": entry}

    telemetry.create_live_counter(
        "slatemq.access.refused.calls",
        lambda: points(usage.refused),
        "{call}",
        "Calls refused because their principal has reached a limit of the policy, or its share",
    )
    telemetry.create_live_gauge(
        "slatemq.access.open.calls",
        lambda: points(usage.open),
        "{call}",
        "Streams and claims that are open, of all principals of an entry together",
    )


def service_tls(config: ServingConfig) -> ChannelTls | None:
    """What channels to other services are opened with; None: without TLS.

    Raises:
        FatalError: A file is not usable.
    """
    try:
        files = certificate_files(config, config.service_identity)
        return None if files is None else ChannelTls(files, config.service_identity)
    except InvalidArgument as error:
        raise _unusable(error) from error


def tls_environment(config: ServingConfig) -> dict[str, str]:
    """The variables by which a process that this one starts connects as it does."""
    stated = {variable_of(name): getattr(config, name) for name in TLS_SETTINGS}
    return {name: value for name, value in stated.items() if value and config.tls_cert}


def inherited_tls(environ: Mapping[str, str]) -> ChannelTls | None:
    """What channels to services are opened with, by the environment; None: without TLS.

    Raises:
        InvalidArgument: A file is not usable.
    """
    files = tls_files(environ)
    if not files:
        return None
    paths = (Path(files[name]) for name in ("ca", "cert", "key"))
    identity = files["identity"]
    return ChannelTls(ServiceFiles(*paths, identity=identity), identity)


def _unusable(error: InvalidArgument) -> FatalError:
    """The end of the process, with the name of the setting."""
    name = setting_of(error.field)
    problem = f"{flag_of(name)}: {error.description}" if name else error.description
    return FatalError.usage(problem)


def _callers(config: ServingConfig) -> Callers | None:
    if not config.access_policy:
        for name in ("access_tokens", "access_issuers"):
            if getattr(config, name):
                raise InvalidArgument(name, "has no effect without --access-policy")
        return None
    # Loaded where there is a policy: with CEL, and what checks tokens.
    callers: Callers = import_module("libs.access.callers").callers_of(
        config.access_policy, config.access_tokens, config.access_issuers
    )
    return callers
