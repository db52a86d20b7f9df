"""`python -m services.janitor give-up`: has an instance do without a shard for ever.

::

    removed-shards/   has the record first: from here on no process starts with the number
    topology/         lacks the shard: the others read the record, and do without
    the database      and the names of its owners are deleted

Each step may be repeated, so what was interrupted goes on when it is run again.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from libs.serving.access import inherited_tls
from libs.serving.peers.topology import TopologyDirectory
from libs.serving.process.exits import EXIT_CLEAN
from libs.serving.process.removal import ShardRemoval
from libs.storage.database.roots import Root, check_folder, open_root
from libs.storage.objects.removed_shards import RemovedShards
from services.janitor.command_lines import audited, exit_code_of, parsed, root_command
from services.janitor.giving_up.running import refuse_running
from services.janitor.snapshots import databases_of
from slatemq._rpc.tls import ChannelTls
from slatemq.errors import FailedPrecondition
from slatemq.models import now_ms

_SHARD: Final = re.compile(r"(ingest|broker)/(0|[1-9]\d*)")

EPILOG: Final = """\
example:
  python -m services.janitor give-up --root s3://bucket/slatemq --yes broker/1

Stop the shard's process first, and what would start it again; the others go on. It is refused while
that process answers: with TLS, SLATEMQ_TLS_CA, SLATEMQ_TLS_CERT and SLATEMQ_TLS_KEY name the
services' certificate. What the shard had is lost for ever. SLATEMQ_ROOT stands in for --root.
Exit codes: 0 done, 1 failed, 2 wrong usage, 130 after Ctrl-C."""


async def give_up(root: Root, database: str, tls: ChannelTls | None = None) -> None:
    """Raises FailedPrecondition, and the errors of the storage.

    `tls` is what the process of the shard may ask for, to say whether it runs.
    """
    removed = RemovedShards(root.objects)
    directory = TopologyDirectory(root.objects)
    try:
        if not await removed.has(database):
            if database not in await databases_of(root.objects):
                raise FailedPrecondition(
                    "NO_SHARD", f"{root.url} has no {database}, neither a database nor an entry"
                )
            await refuse_running(root, directory, database, tls)
            await removed.add(database, now_ms(), is_given_up=True)
        await ShardRemoval(root, directory, database).finish()
    finally:
        await directory.close()


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> argparse.Namespace:
    """Raises SystemExit: 0 after `--help`, 2 for a wrong command line."""
    parser, command = root_command(
        "give-up",
        "Give a shard up for ever: delete what is left of it, and retire its number.",
        EPILOG,
        environ,
    )
    command.add_argument(
        "--yes",
        action="store_true",
        required=True,
        help="its process is stopped, and its data can be deleted",
    )
    command.add_argument("shard", metavar="SHARD", help="such as broker/1 or ingest/2")
    args = parsed(parser, command, argv)
    if not _SHARD.fullmatch(args.shard):
        command.error(f"{args.shard!r} is not a shard: give one such as broker/1 or ingest/2")
    return args


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Do what a command line says; returns the exit code."""
    args = parse(argv, environ)

    def give_up_shard() -> int:
        check_folder(args.root)
        root = open_root(args.root, args.wal_store)
        with audited("give-up", root=root.url, shard=args.shard):
            asyncio.run(give_up(root, args.shard, inherited_tls(environ)))
        sys.stdout.write(f"{args.shard} was given up: never start a process with its number\n")
        return EXIT_CLEAN

    return exit_code_of(give_up_shard, "repeat it, since a part may be done")
