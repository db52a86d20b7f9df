"""`slatemq doctor`: examine an instance, and say what to do."""

from __future__ import annotations

import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import slatemq
from slatemq.cli.failures import EXIT_REFUSED
from slatemq.cli.monitor.findings import Answers, Finding, Level, findings_of, is_well
from slatemq.cli.output import progress, say, write_json
from slatemq.cli.session import Session, command
from slatemq.models import now_ms

if TYPE_CHECKING:
    from slatemq._admin.examining import CertificateExpiry
    from slatemq.client import Client

STEPS: Final = 3

MARKS: Final = {Level.OK: "ok", Level.WARNING: "WARNING", Level.PROBLEM: "PROBLEM"}


@command("doctor")
def doctor(session: Session) -> None:
    """Examine the instance: processes, clocks, store, certificates; say what to do.

    Examples:
      slatemq doctor
      slatemq doctor && echo all is well
      slatemq doctor --json | jq 'select(.level != "ok")'

    It examines the health and settings of all processes, the caller's rights,
    versions, the topology, clocks, the store, pending compactions, the disk of a
    file:// store, certificates that expire soon, and queues in quarantine. It
    changes nothing; to test the store, owners of shards write an object with a
    random name and remove it, as they do when they start.

    It needs the verb operate; without it, it examines what other callers may see.
    Exit code 1: there is a problem. Warnings alone exit with 0.
    """
    found = session.call(lambda client: _examine(session, client))
    for one in found:
        if session.json:
            write_json(asdict(one))
            continue
        say(f"{MARKS[one.level]:8} {one.check:13} {one.text}")
        if one.advice:
            say(f"{'':22} {one.advice}")
    if not is_well(found):
        sys.exit(EXIT_REFUSED)


async def _examine(session: Session, client: Client) -> list[Finding]:
    with progress(not session.json, "examine", STEPS) as update:
        status = await client.status()
        update(completed=1)
        caller = await client.get_caller()
        update(completed=2)
        examined = await client.examine() if "operate" in caller.verbs else []
        update(completed=STEPS)
    own = _own_certificates(session)
    return findings_of(Answers(status, caller, examined, own, slatemq.__version__, now_ms()))


def _own_certificates(session: Session) -> list[CertificateExpiry]:
    """The client's own certificates that can be read; only those load `cryptography`."""
    credentials = session.credentials()
    files = [Path(file) for file in (credentials.cert, credentials.ca) if file]
    if not files:
        return []
    module: Any = import_module("slatemq._admin.expiries")
    expiries: list[CertificateExpiry] = module.expiries_of(files)
    return expiries
