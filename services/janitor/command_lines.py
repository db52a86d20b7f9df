"""The command lines of what works on the root of an instance without its processes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence


def root_command(
    name: str, description: str, epilog: str, environ: Mapping[str, str]
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parser of `python -m services.janitor NAME`, and that of its arguments.

    These have `--root` and `--wal-store`; parse with `parsed`.
    """
    parser = argparse.ArgumentParser(prog="python -m services.janitor", allow_abbrev=False)
    command = parser.add_subparsers(dest="command", required=True).add_parser(
        name,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--root", default=environ.get("SLATEMQ_ROOT"), help="URL of the root")
    command.add_argument(
        "--wal-store",
        default="",
        help="URL of the store that has the WALs, where it is not reached by that of the record",
    )
    return parser, command


def parsed(
    parser: argparse.ArgumentParser, command: argparse.ArgumentParser, argv: Sequence[str]
) -> argparse.Namespace:
    """Raises SystemExit: 0 after `--help`, 2 for a wrong command line, as without a root."""
    args = parser.parse_args(argv)
    if not args.root:
        command.error("--root or SLATEMQ_ROOT is required")
    return args
