"""The environment that services are started with, and what of it the stack itself decides."""

from __future__ import annotations

from collections.abc import Mapping

from slatemq.variables import is_service_link

_INSTEAD = {
    "SLATEMQ_ROOT": "--data or --store says where all data is",
    "SLATEMQ_HOST": "all services listen on 127.0.0.1",
    "SLATEMQ_PORT": "use --ports BASE",
    "SLATEMQ_HTTP_PORT": "use --http-ports BASE",
    "SLATEMQ_ADVERTISED_ADDRESS": "clients reach all services on 127.0.0.1",
    "SLATEMQ_PEER_ADDRESS": "services reach each other on 127.0.0.1",
    "SLATEMQ_READY_FILE": "use --ready-file F",
    "SLATEMQ_SHARD": "all of them are shard 0; start others as `python -m services.broker`",
    "SLATEMQ_PARENT_PID": "the services end with the stack",
}
"""The settings that several processes cannot share, and what holds instead."""


def environment_of_services(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in _INSTEAD}


def variables_without_effect(environ: Mapping[str, str]) -> str:
    """A sentence about the settings that the stack does not pass on; empty without any."""
    named = [
        f"{name} ({instead})"
        for name, instead in _INSTEAD.items()
        if (value := environ.get(name)) and not is_service_link(name, value)
    ]
    return f"environment variables without effect on a stack: {'; '.join(named)}" if named else ""
