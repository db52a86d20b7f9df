"""The command line of `python -m services`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from libs.serving.process.event_settings import read_queue_settings
from libs.storage.database.addresses import parse_root, parse_wal_store
from slatemq.errors import InvalidArgument
from slatemq.variables import is_service_link

PORT_MAX = 65_535

WITH_STANDBYS = ("ingest", "broker")
"""The services that have a standby each with `--standbys`."""

DESCRIPTION = """\
Runs all of SlateMQ on this machine: ingest, router, broker, janitor and console, each as a process
of its own on loopback. Prints two lines on stdout once all of them serve; everything else goes to
stderr and into the logs. A service that dies is started again on its port; one that was fenced,
because another process owns its data now, is not, and when no owner of data is left the stack ends.
SIGTERM or Ctrl-C drains and stops everything; a second one hurries."""

EPILOG = """\
examples:
  python -m services --data data                     a folder, free ports
  python -m services --data data --ports 7420        ingest 7420, router 7421, broker 7422,
                                                     janitor 7423, console 7424
  python -m services --store 's3://bucket/slatemq?region=eu-central-1'

Clients need one address, any service's; they find the rest by themselves. Settings of the
services come from the environment (SLATEMQ_…): see `python -m services.broker --help` and so on.

exit codes: 0 stopped when asked to, 1 could not start or did not stop cleanly, 2 wrong usage,
77 fenced: another stack runs on this data now"""


@dataclass(frozen=True)
class StackOptions:
    """What to run.

    Attributes:
        root: URL of the object store folder that holds all data.
        data: The same as a folder, when it is one.
        logs: Folder for a log file per service; None sends all logs to stderr.
        ports: The first service's port, the others follow; None takes free ones.
        http_ports: The first service's HTTP port, the others follow; 0: free ones; None: none.
        ready_file: Where to write the endpoints as JSON once all serve.
        wal_store: URL of the store of the write-ahead logs alone; empty: as the instance has it.
        standbys: Whether ingest and broker have a standby each.
        take_over: Whether to take the data of a stack that runs on the same folder.
    """

    root: str
    data: Path | None
    logs: Path | None
    ports: int | None
    ready_file: Path | None
    http_ports: int | None
    config: str
    wal_store: str
    standbys: bool = False
    take_over: bool = False


def parse(argv: Sequence[str], services_count: int, environ: Mapping[str, str]) -> StackOptions:
    """Raises SystemExit: 0 after `--help`, 2 with a message on stderr for a wrong command line."""
    parser = _parser(environ)
    args = parser.parse_args(argv)
    if args.standbys:
        services_count += len(WITH_STANDBYS)
    for flag, base in (("--ports", args.ports), ("--http-ports", args.http_ports or None)):
        if base is not None and not 1 <= base <= PORT_MAX - services_count + 1:
            parser.error(f"{flag} must be from 1 to {PORT_MAX - services_count + 1}")
    if args.store is not None and args.store.startswith("memory:"):
        parser.error("--store memory:// is one process's own: services would not see each other")
    try:
        read_queue_settings(args.config, environ)
    except InvalidArgument as error:
        parser.error(error.message)
    data = args.data.resolve() if args.data is not None else None
    root = data.as_uri() if data is not None else args.store
    try:
        address = parse_root(root)
        if args.wal_store:
            parse_wal_store(args.wal_store, address)
    except ValueError as error:
        parser.error(str(error))
    logs = args.logs or (data / "logs" if data is not None else None)
    return StackOptions(
        root=root,
        data=data,
        logs=logs.resolve() if logs is not None else None,
        ports=args.ports,
        ready_file=args.ready_file,
        http_ports=args.http_ports,
        config=args.config,
        wal_store=args.wal_store,
        standbys=args.standbys,
        take_over=args.take_over,
    )


_INSTEAD = {
    "SLATEMQ_ROOT": "--data or --store says where all data is",
    "SLATEMQ_HOST": "all services listen on 127.0.0.1",
    "SLATEMQ_PORT": "use --ports BASE",
    "SLATEMQ_PEER_PORT": "each service takes a free one",
    "SLATEMQ_HTTP_PORT": "use --http-ports BASE",
    "SLATEMQ_ADVERTISED_ADDRESS": "clients reach all services on 127.0.0.1",
    "SLATEMQ_PEER_ADDRESS": "services reach each other on 127.0.0.1",
    "SLATEMQ_READY_FILE": "use --ready-file F",
    "SLATEMQ_SHARD": "all of them are shard 0; start others as `python -m services.broker`",
    "SLATEMQ_PARENT_PID": "the services end with the stack",
    "SLATEMQ_STANDBY": "use --standbys",
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


def _parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m services",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument(
        "--data", metavar="DIR", type=Path, help="folder for all data; made if absent"
    )
    place.add_argument(
        "--store", metavar="URL", help="object store for all data: s3://, gs://, az:// or file://"
    )
    parser.add_argument(
        "--wal-store",
        metavar="URL",
        default=environ.get("SLATEMQ_WAL_STORE", ""),
        help="bucket or folder for the write-ahead logs alone, such as that of a fast disk",
    )
    parser.add_argument(
        "--ports",
        metavar="BASE",
        type=int,
        help="port of the first service, the others follow; free ports when not given",
    )
    parser.add_argument(
        "--http-ports",
        metavar="BASE",
        type=int,
        help="HTTP port of the first service (GET /health, GET /metrics), the others follow; 0: "
        "free ports, which the ready file names; none are opened when not given",
    )
    parser.add_argument(
        "--ready-file",
        metavar="F",
        type=Path,
        help="file to write the endpoints to, as JSON, once all serve; removed at the end",
    )
    parser.add_argument(
        "--logs",
        metavar="DIR",
        type=Path,
        help="folder for one log file per service; DIR/logs with --data, stderr with --store",
    )
    parser.add_argument(
        "--standbys",
        action="store_true",
        help="run a standby each of ingest and broker, which takes over when its owner ends",
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="take the data of a stack that runs on the same folder: its services are fenced, and "
        "it ends; without this, the start is refused",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=environ.get("SLATEMQ_CONFIG", ""),
        help="YAML file with the settings of event queues, for every service",
    )
    return parser
