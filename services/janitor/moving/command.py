"""`python -m services.janitor move-wals`: moves the write-ahead logs of a stopped instance."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from libs.serving.process.exits import EXIT_CLEAN
from libs.storage.database.roots import check_folder, open_root
from services.janitor.command_lines import audited, exit_code_of, parsed, root_command
from services.janitor.moving.wals import WalMove

EPILOG: Final = """\
examples:
  python -m services.janitor move-wals --root s3://bucket/slatemq --to file:///fast/slatemq
  python -m services.janitor move-wals --root s3://bucket/slatemq --to s3://other --lost

Stop all processes first; one that runs on is fenced, and does not start again before the move has
ended. A move that was interrupted goes on when it is repeated. SLATEMQ_ROOT stands in for --root.
Exit codes: 0 done, 1 failed, 2 wrong usage, 130 after Ctrl-C."""


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> argparse.Namespace:
    """Raises SystemExit: 0 after `--help`, 2 for a wrong command line."""
    parser, move = root_command(
        "move-wals",
        "Move the write-ahead logs of a stopped instance to a store of their own.",
        EPILOG,
        environ,
    )
    # The variable may name the new store already.
    move.set_defaults(wal_store="")
    move.add_argument("--to", required=True, help="URL of the bucket or folder for the WALs")
    move.add_argument(
        "--lost",
        action="store_true",
        help="the store that had the WALs is lost: continue from the tables only; what was "
        "answered since the last table was written is lost for ever",
    )
    return parsed(parser, move, argv)


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Do what a command line says; returns the exit code."""
    args = parse(argv, environ)

    def move_wals() -> int:
        check_folder(args.root)
        source, target = open_root(args.root, args.wal_store), open_root(args.root, args.to)
        with audited("move-wals", root=target.url, to=args.to, lost=args.lost):
            asyncio.run(WalMove(source, target, args.lost, _say).move())
        sys.stdout.write(f"the WALs of {target.url} are in {args.to}: start its processes\n")
        return EXIT_CLEAN

    return exit_code_of(move_wals, "repeat it, or no process starts")


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
