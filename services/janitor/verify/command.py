"""`python -m services.janitor verify`: verifies an instance whose processes are stopped.

Reads the store directly, and writes nothing. stdout has the result alone.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TextIO

from libs.serving.process.exits import EXIT_CLEAN
from libs.storage.database.roots import Root, check_folder, open_root
from libs.storage.errors import CorruptRecord
from libs.storage.objects.restores import refuse_unfinished_restore
from services.janitor.command_lines import ProgressLine, exit_code_of, parsed, root_command
from services.janitor.verify.findings import Finding, Findings
from services.janitor.verify.verification import StoppedDatabases, Verification
from slatemq._counts import counted
from slatemq.errors import FailedPrecondition
from slatemq.models import now_ms
from slatemq.variables import unknown_variables

FAULTS: Final = 1

EPILOG: Final = """\
Each line names the shard, the record, its key, what is wrong, and what to do. A fault means that
something is lost or wrong; a leftover only takes space.

examples:
  python -m services.janitor verify --root file:///var/lib/slatemq
  python -m services.janitor verify --root 's3://bucket/prefix?region=eu-central-1' --json

`slatemq verify` does the same on a running instance, from snapshots. SLATEMQ_ROOT is the root
where none is given. Exit codes: 0 nothing is wrong, 1 there are faults, or the store cannot be
read, 2 wrong usage, 130 after Ctrl-C, SIGTERM or SIGHUP."""


@dataclass(frozen=True)
class Arguments:
    root: str
    wal_store: str = ""
    as_json: bool = False
    sizes_only: bool = False


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Arguments:
    """Raises SystemExit: 0 after `--help`, 2 for a wrong command line."""
    parser, verify = root_command(
        "verify",
        "Verify a stopped instance: its files, every record, every cross-reference.",
        EPILOG,
        environ,
    )
    verify.add_argument("--json", action="store_true", help="print one JSON object")
    verify.add_argument(
        "--sizes-only",
        action="store_true",
        help="compare the sizes of payload objects; do not read them",
    )
    args = parsed(parser, verify, argv)
    return Arguments(args.root, args.wal_store, args.json, args.sizes_only)


async def verify_stopped(root: Root, sizes_only: bool = False, quiet: bool = True) -> Findings:
    """Verify an instance whose processes are stopped.

    Raises StoreUnavailable, UnfinishedRestore, and FailedPrecondition: NO_INSTANCE, or IN_USE where
    a process has changed it meanwhile.
    """
    await refuse_unfinished_restore(root.objects, root.url)
    databases = await StoppedDatabases.find(root)
    if not databases.names:
        raise FailedPrecondition(
            "NO_INSTANCE", f"{root.url} has no databases: is it the root of an instance?"
        )
    await _find_wals(root)
    before = await _positions(root, databases.names)
    line = None if quiet else ProgressLine()

    def report(doing: str, done: int, count: int) -> None:
        if line is not None:
            line.show(f"{doing} ({done} of {counted(count, 'database')} done)")

    # Not by the clock of the store, which takes a write: nothing is removed.
    verification = Verification(root, databases, now_ms(), report, sizes_only=sizes_only)
    try:
        findings = await verification.run()
    finally:
        if line is not None:
            line.clear()
    changed = [
        name
        for name, position in (await _positions(root, databases.names)).items()
        if position != before[name]
    ]
    if changed:
        raise FailedPrecondition(
            "IN_USE",
            f"{', '.join(changed)} changed meanwhile: stop all processes first, or run "
            "`slatemq verify`, which verifies a running instance",
        )
    return findings


async def _find_wals(root: Root) -> None:
    """Where a damaged record does not say, the WALs are looked for below the root."""
    try:
        await root.wal_store()
    except CorruptRecord:
        root.use_wal_store(root.own_wal_store())  # The verification names the record.


async def _positions(root: Root, names: Sequence[str]) -> dict[str, str]:
    """The newest file of each WAL: a process that owns the database has written one since."""
    objects = (await root.wal_store()).objects
    return {name: max(await objects.list(f"{name}/wal"), default="") for name in names}


def as_json(findings: Findings) -> dict[str, Any]:
    """The result for scripts."""
    return {
        "faults": findings.faults_count,
        "leftovers": findings.leftovers_count,
        "counts": dict(sorted(findings.counts.items())),
        "findings": [fields_of(one) for one in findings.all()],
    }


def fields_of(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind.value,
        "is_fault": finding.is_fault,
        "shard": finding.shard,
        "record": finding.record,
        "key": finding.key,
        "wrong": finding.wrong,
        "what_to_do": finding.what_to_do,
        "queue_id": finding.queue_id,
        "message_ids": list(finding.message_ids),
    }


def write_text(findings: Findings, took_s: float, out: TextIO) -> None:
    """The result for people."""
    for finding in findings.all():
        out.write(f"{'fault' if finding.is_fault else 'leftover'}: {finding}\n")
        out.write(f"  {finding.what_to_do}\n")
    if findings.unreadable:
        out.write(
            f"did not look for leftovers: {', '.join(sorted(findings.unreadable))} cannot be read "
            "completely, and may need what looks like one\n"
        )
    counts = findings.counts
    rows = sum(count for name, count in counts.items() if name.startswith("rows/"))
    read = {
        "database": counts["databases"],
        "file": counts["files"],
        "row": rows,
        "message": counts["messages"],
        "payload object": counts["payload objects"],
    }
    out.write(
        f"{counted(findings.faults_count, 'fault')}, "
        f"{counted(findings.leftovers_count, 'leftover')}; read "
        f"{', '.join(counted(count, noun) for noun, count in read.items())} in {took_s:.1f} s\n"
    )


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Verify what a command line names; returns the exit code."""
    args = parse(argv, environ)
    if unknown := unknown_variables(environ):
        sys.stderr.write(f"warning: {unknown}\n")
    began = time.monotonic()

    def verify() -> int:
        check_folder(args.root)
        root = open_root(args.root, args.wal_store)
        findings = asyncio.run(verify_stopped(root, args.sizes_only, quiet=args.as_json))
        if args.as_json:
            sys.stdout.write(json.dumps(as_json(findings)) + "\n")
        else:
            write_text(findings, time.monotonic() - began, sys.stdout)
        return FAULTS if findings.faults_count else EXIT_CLEAN

    return exit_code_of(verify, "nothing was changed")
