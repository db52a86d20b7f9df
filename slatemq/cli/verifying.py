"""`slatemq verify` and `slatemq repair`: what is wrong with an instance, and its repair."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from slatemq._counts import counted
from slatemq.cli.failures import EXIT_REFUSED
from slatemq.cli.job_runs import end_of
from slatemq.cli.output import note, say, write_json
from slatemq.cli.parameters import flag
from slatemq.cli.session import Session, command

if TYPE_CHECKING:
    from slatemq._admin.janitor import JobFinding, JobRun

_SIZES_ONLY = flag("--sizes-only", help="Compare the sizes of payload objects; do not read them.")


_READ = ("database", "file", "row", "message", "payload object")
"""What a run counts, in the order of its answer."""


@command("verify")
@_SIZES_ONLY
def verify(session: Session, sizes_only: bool) -> None:
    """Verify the instance: every record, file and cross-reference; change nothing.

    Examples:
      slatemq verify
      slatemq verify --sizes-only
      slatemq verify --json | jq '.findings[] | select(.is_fault)'

    The janitor takes snapshots of all shards, reads every row and payload object,
    and compares them: counts and lists, logs and queues, cursors, outboxes, names.
    It does not need Spark, and the instance keeps working meanwhile. Each line
    names the shard, the record, its key, what is wrong, and what to do.

    Exit code 1: something is wrong, or the run did not complete. Leftovers, which
    only take space, exit with 0. For a stopped instance use
    `python -m services.janitor verify`.
    """
    run = session.call(lambda client: client.run_job("verify", sizes_only=sizes_only))
    _show_end(session, end_of(session, run))


@command("repair")
@_SIZES_ONLY
@flag("--dry-run", help="Only say what would be repaired.")
def repair(session: Session, sizes_only: bool, dry_run: bool) -> None:
    """Verify the instance, then remove what is left over.

    Examples:
      slatemq repair --dry-run
      slatemq repair

    Removes what is certainly not needed: payload objects older than a day that
    nothing names, and claims of names whose broker has no such queue. Where a
    shard is lost or cannot be read completely, it removes nothing: that shard may
    need it. It never guesses what a damaged record held: faults stay, and are
    named with what to do. A message whose payload is lost becomes a dead letter
    when it is claimed.

    Exit code 1: a fault is left, or the run did not complete.
    """
    run = session.call(
        lambda client: client.run_job("repair", sizes_only=sizes_only, dry_run=dry_run)
    )
    _show_end(session, end_of(session, run))


def _show_end(session: Session, run: JobRun) -> None:
    if session.json:
        fields = asdict(run)
        for finding in fields["findings"]:
            finding["message_ids"] = [str(one) for one in finding["message_ids"]]
        write_json(fields)
    else:
        for finding in run.findings:
            _show(finding, run.dry_run)
        if run.state == "done":
            _sum_up(run)
        else:
            note(f"run {run.run_id} is {run.state.value}: {run.error}")
    if run.state != "done" or run.counts.get("faults", 0):
        sys.exit(EXIT_REFUSED)


def _show(finding: JobFinding, dry_run: bool) -> None:
    what = "fault" if finding.is_fault else "leftover"
    say(f"{what}: {finding.shard}: {finding.record} {finding.key}: {finding.wrong}")
    if finding.repaired:
        say("  would be repaired" if dry_run else "  repaired")
    else:
        say(f"  {finding.what_to_do}")


def _sum_up(run: JobRun) -> None:
    counts = run.counts
    shown = len(run.findings)
    found = counts.get("faults", 0) + counts.get("leftovers", 0)
    if found > shown:
        note(f"only the first {shown} of {found} findings are shown")
    if unread := counts.get("shards_unread", 0):
        removed = " and removes nothing" if run.job == "repair" else ""
        note(
            f"{run.job} looks for no leftovers{removed} while {unread} of the shards named above "
            "cannot be read completely: they may need what looks like a leftover"
        )
    found_words = ", ".join(counted(counts.get(f"{one}s", 0), one) for one in ("fault", "leftover"))
    read = {one: counts.get(f"{one.replace(' ', '_')}s", 0) for one in _READ}
    read_words = ", ".join(counted(count, one) for one, count in read.items())
    say(f"{found_words}; read {read_words}")
