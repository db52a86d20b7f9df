"""`python -m services.janitor backup`: create, ls, verify, restore.

For operators, with credentials for both stores; no service needs to run. Progress and messages go
to stderr, answers to stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from libs.serving.process.exits import EXIT_CLEAN
from libs.storage.database.addresses import overlap, parse_root
from libs.storage.database.roots import Root, check_folder, open_root
from services.janitor.backup.catalogue import BACKUPS, OBJECTS, Backup, Catalogue
from services.janitor.backup.damage import NAMED_MAX, counts_of, describe
from services.janitor.backup.lacking import LackingSearch
from services.janitor.backup.restoring import Restoring
from services.janitor.backup.shards import snapshots_of_stopped
from services.janitor.backup.taking import BackupSource, Taking
from services.janitor.backup.verifying import Verifying
from services.janitor.command_lines import ProgressLine, audited, exit_code_of
from services.janitor.jobs.contract import Progress
from services.janitor.runs.history import RunStore
from slatemq._counts import counted
from slatemq.errors import FailedPrecondition
from slatemq.models import now_ms

EPILOG: Final = """\
examples:
  python -m services.janitor backup ls --backups s3://backups/orders
  python -m services.janitor backup verify --backups s3://backups/orders
  python -m services.janitor backup restore --backups s3://backups/orders --root s3://new/slatemq
  python -m services.janitor backup create --root s3://old/slatemq --backups s3://backups/orders

An instance that serves is backed up by its janitor: `slatemq janitor run backup`, or the
setting backup_schedule. SLATEMQ_ROOT, SLATEMQ_BACKUP_ROOT and SLATEMQ_BACKUPS_KEPT
stand in for --root, --backups and --kept. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 after
Ctrl-C."""


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> argparse.Namespace:
    """Raises SystemExit: 0 after `--help`, 2 for a wrong command line."""
    parser = argparse.ArgumentParser(prog="python -m services.janitor", allow_abbrev=False)
    backup = parser.add_subparsers(dest="command", required=True).add_parser(
        "backup",
        description="Backups of an instance, and instances made from them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = backup.add_subparsers(dest="what", required=True)

    def command(name: str, help_: str, description: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help_, description=description)
        added.add_argument(
            "--backups",
            default=environ.get("SLATEMQ_BACKUP_ROOT"),
            help="URL of the root that backups are in (SLATEMQ_BACKUP_ROOT)",
        )
        added.add_argument("--json", action="store_true", help="print JSON, for programs")
        return added

    create = command(
        "create",
        "back up an instance whose processes are stopped",
        "Back up an instance whose processes are stopped. It takes over all shards: an ingest or a "
        "broker that still runs ends, and what it has answered is in the backup. For an instance "
        "that serves, use `slatemq janitor run backup`.",
    )
    create.add_argument(
        "--kept",
        type=_positive,
        default=environ.get("SLATEMQ_BACKUPS_KEPT") or None,
        help="how many backups stay, the newest (SLATEMQ_BACKUPS_KEPT; all, if not given)",
    )
    command("ls", "list the backups, the newest first", "List the backups, the newest first.")
    verify = command(
        "verify",
        "read all copies of a backup, and say which are gone or have rotted",
        "Read all that a backup needs, and compare it with what was written. It changes nothing. "
        f"It names at most {NAMED_MAX} copies that are gone, and as many that have rotted, and "
        "counts all. Exit code 1: the backup is damaged, or, with --messages, messages lack their "
        "payload.",
    )
    verify.add_argument(
        "--messages",
        action="store_true",
        help="also name messages whose payload was gone before the backup was taken; this copies "
        "the tables of one ingest at a time into a temporary folder (TMPDIR)",
    )
    restore = command(
        "restore",
        "make an instance from a backup",
        "Make an instance from a backup, below a root that has none. Start its processes when it "
        "has ended. A restore that was interrupted goes on when it is repeated.",
    )
    _add_arguments(create, verify, restore, environ)
    args = parser.parse_args(argv)
    if not args.backups:
        backup.error("--backups or SLATEMQ_BACKUP_ROOT is required")
    if args.what in ("create", "restore") and not args.root:
        backup.error("--root or SLATEMQ_ROOT is required")
    return args


def _add_arguments(
    create: argparse.ArgumentParser,
    verify: argparse.ArgumentParser,
    restore: argparse.ArgumentParser,
    environ: Mapping[str, str],
) -> None:
    for one in (verify, restore):
        one.add_argument("backup_id", nargs="?", default="", metavar="BACKUP", help="else newest")
    restore.add_argument(
        "--prepare",
        action="store_true",
        help="only copy objects ahead, so that a later restore takes less time; repeat it at will",
    )
    restore.add_argument(
        "--without-missing",
        action="store_true",
        help="go on where copies of payloads, archived dead letters or task bodies are gone; "
        "without it nothing is restored then",
    )
    for one in (create, restore):
        one.add_argument(
            "--root",
            default=environ.get("SLATEMQ_ROOT"),
            help="URL of the instance's root (SLATEMQ_ROOT)",
        )
        one.add_argument(
            "--wal-store",
            default=environ.get("SLATEMQ_WAL_STORE", ""),
            help="URL of the store of its WALs alone, if not its root (SLATEMQ_WAL_STORE)",
        )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Do what a command line says; returns the exit code."""
    args = parse(argv, environ)
    does: dict[str, Callable[[argparse.Namespace], Coroutine[Any, Any, None]]]
    does = {"create": _create, "ls": _list, "verify": _verify, "restore": _restore}

    def run() -> int:
        asyncio.run(does[args.what](args))
        return EXIT_CLEAN

    return exit_code_of(run, "what is copied stays, and need not be copied again")


async def _create(args: argparse.Namespace) -> None:
    check_folder(args.root)
    root, backups = _two_roots(args)
    source = BackupSource(
        root,
        lambda: snapshots_of_stopped(root, now_ms()),
        RunStore(root.objects),
    )
    kept = sys.maxsize if args.kept is None else args.kept
    taking = Taking(source, backups, kept, report=_ProgressLine().say)
    with audited("backup create", root=root.url, backups=backups.url, kept=args.kept or "all"):
        backup = await taking.take()
    if taking.removed_count:
        sys.stderr.write(f"removed {taking.removed_count:,} older backups: --kept is {kept}\n")
    _show(args, _fields(backup), backup.backup_id)


async def _list(args: argparse.Namespace) -> None:
    check_folder(args.backups)
    backups = open_root(args.backups)
    catalogue = Catalogue(backups.objects)
    ids = await catalogue.ids()
    if not ids:
        sys.stderr.write(f"no backups in {backups.url}\n")
    for backup_id in ids:
        fields = _fields(await catalogue.get(backup_id))
        line = "{backup_id}  {taken_at}  {objects_count:>9,} objects {objects_bytes:>17,} bytes"
        _show(args, fields, f"{line.format(**fields)}  {fields['source']}")


async def _verify(args: argparse.Namespace) -> None:
    check_folder(args.backups)
    catalogue = Catalogue(open_root(args.backups).objects)
    backup = await catalogue.get(args.backup_id)
    verifying = Verifying(catalogue, backup, _ProgressLine().say)
    await verifying.verify()
    fields: dict[str, Any] = {
        "backup_id": backup.backup_id,
        "objects_checked": verifying.checked_count,
    }
    gone = verifying.payloads_gone
    fields |= {"payloads_gone": gone[:NAMED_MAX], "payloads_gone_count": len(gone)}
    if gone:
        sys.stderr.write(
            f"the backup before, {verifying.before}, has {describe(gone)}, which this one lacks: "
            "jobs of the janitor remove those of old messages. --messages says whether messages "
            "lack theirs\n"
        )
    said: list[str] = []
    damaged = {"missing": verifying.missing, "rotten": verifying.rotten}
    for name, paths in damaged.items():
        fields |= _damage_fields(name, paths)
        said += [f"{name}: {path}" for path in paths[:NAMED_MAX]]
        if len(paths) > NAMED_MAX:
            said.append(f"{name}: {len(paths) - NAMED_MAX:,} more")
    if args.messages and not said:
        await _verify_messages(args, catalogue, backup, fields)
        return
    _show(args, fields, "\n".join(said) or _as_written(verifying.checked_count))
    if said:
        count = len(verifying.missing) + len(verifying.rotten)
        what = "; ".join(f"{name}: {describe(paths)}" for name, paths in damaged.items() if paths)
        raise FailedPrecondition(
            "BACKUP_DAMAGED",
            f"{count:,} of {counted(verifying.checked_count, 'object')} "
            f"{'is' if count == 1 else 'are'} not as written: "
            f"{what}. {_advice(backup, verifying)}",
        )


def _as_written(count: int) -> str:
    return counted(count, "object is as written", "objects are as written")


async def _verify_messages(
    args: argparse.Namespace, catalogue: Catalogue, backup: Backup, fields: dict[str, Any]
) -> None:
    search = LackingSearch(catalogue, backup, _ProgressLine().say)
    await search.search()
    count, named = len(search.found), search.found[:NAMED_MAX]
    fields["messages_lacking"] = [str(one.message_id) for one in named]
    fields["messages_lacking_count"] = count
    said = [f"lacks its payload: message {one.message_id}, {one.path}" for one in named]
    if count > NAMED_MAX:
        said.append(f"lack their payload: {counted(count - NAMED_MAX, 'more message')}")
    whole = f"{_as_written(fields['objects_checked'])}; no message lacks its payload"
    _show(args, fields, "\n".join(said) or whole)
    if count:
        raise FailedPrecondition(
            "PAYLOADS_GONE",
            f"the payloads of {counted(count, 'message')} were gone before the backup was taken. "
            f"Copy what an earlier backup has from {OBJECTS}/ back to the instance; queues make "
            "the other messages dead letters (payload gone)",
        )


def _damage_fields(name: str, paths: Sequence[str]) -> dict[str, Any]:
    """Names of some, the count of all, and of those of each shard, the payloads and so on."""
    return {
        name: paths[:NAMED_MAX],
        f"{name}_count": len(paths),
        f"{name}_by_place": counts_of(paths),
    }


def _advice(backup: Backup, verifying: Verifying) -> str:
    """Objects are copied again; manifests are of one backup, and nothing writes them again."""
    if any(path.startswith(f"{BACKUPS}/") for path in (*verifying.missing, *verifying.rotten)):
        return (
            "Without its manifests this backup cannot be restored: use another one, and delete "
            f"{backup.folder}/"
        )
    return (
        f"Delete the rotten ones from {OBJECTS}/ as far as the instance still has them: the next "
        "backup copies them again, and what is missing, too"
    )


async def _restore(args: argparse.Namespace) -> None:
    if overlap(parse_root(args.root), parse_root(args.backups)):
        raise ValueError("--root and --backups must not lie one in the other")
    check_folder(args.backups)
    root, backups = _two_roots(args)
    catalogue = Catalogue(backups.objects)
    backup = await catalogue.get(args.backup_id)
    restoring = Restoring(
        catalogue, backup, root, args.prepare, args.without_missing, _ProgressLine().say
    )
    facts = {"root": root.url, "backups": backups.url, "backup": backup.backup_id}
    with audited("backup restore", **facts, prepare=args.prepare):
        await restoring.restore()
    fields = {
        "backup_id": backup.backup_id,
        "taken_at": _rfc_3339(backup.taken_at_ms),
        "root": root.url,
        "objects_copied": restoring.copied_count,
        "bytes_copied": restoring.copied_bytes,
        "databases": len(backup.databases),
        "queues": restoring.queues_count,
        **_damage_fields("missing", restoring.missing),
        **_damage_fields("rotten", restoring.rotten),
    }
    said = f"{root.url} is the instance of {fields['taken_at']}: start its processes"
    if args.prepare:
        said = f"{root.url} has the objects of {backup.backup_id}, and is not an instance yet"
    if restoring.rotten:
        said += f"; without {counted(len(restoring.rotten), 'object')} whose copies have rotted"
    if restoring.missing:
        said += f"; without {counted(len(restoring.missing), 'object')} whose copies are gone"
    _show(args, fields, said)


def _two_roots(args: argparse.Namespace) -> tuple[Root, Root]:
    """The roots of the instance and of the backups; a folder that is not there is made."""
    return open_root(args.root, args.wal_store), open_root(args.backups)


def _fields(backup: Backup) -> dict[str, Any]:
    return {
        "backup_id": backup.backup_id,
        "source": backup.source,
        "taken_at": _rfc_3339(backup.taken_at_ms),
        "ended_at": _rfc_3339(backup.ended_at_ms),
        "databases": [one.database for one in backup.databases],
        "objects_count": backup.objects_count,
        "objects_bytes": backup.objects_bytes,
        "copied_count": backup.copied_count,
        "copied_bytes": backup.copied_bytes,
    }


def _show(args: argparse.Namespace, fields: Mapping[str, Any], line: str) -> None:
    sys.stdout.write(f"{json.dumps(fields) if args.json else line}\n")
    sys.stdout.flush()


def _rfc_3339(moment_ms: int) -> str:
    moment = datetime.fromtimestamp(moment_ms / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


class _ProgressLine:
    """Progress by its phases, the last line of each of which stays."""

    def __init__(self) -> None:
        self._line = ProgressLine()
        self._phase = 0

    def say(self, progress: Progress) -> None:
        count, done = progress.tasks_count, progress.tasks_done
        begins, self._phase = progress.phase_number != self._phase, progress.phase_number
        if count or self._line.is_terminal:
            line = f"{progress.phase}: {done:,} of {count:,}"
            self._line.show(line, at_once=begins or done == count)
        if count and done == count:
            self._line.keep()
