"""All processes of the local stack: their order of start and end, and the ready file."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from libs.serving.process.exits import EXIT_FENCED
from libs.serving.process.healthprobe import tls_files
from services.stack.options import WITH_STANDBYS, StackOptions, environment_of_services
from services.stack.ports import HOST
from services.stack.process import Program, Supervised


@dataclass(frozen=True)
class StackProcess:
    """One process: `python -m services.<name>`, or a standby of that service.

    Attributes:
        owns_data: Whether it writes a database, and so can be fenced.
        after: Services that must serve before it is started first.
        has_pages: Whether people connect to it with a browser, and no client does.
        standby_of: The service that it is a standby of; empty: none.
    """

    name: str
    owns_data: bool
    after: Sequence[str] = ()
    has_pages: bool = False
    standby_of: str = ""


PARTS = (
    StackProcess("ingest", owns_data=True),
    # Others look up where the owners are: after a change of ports the old address is wrong.
    StackProcess("router", owns_data=False, after=("ingest", "broker")),
    StackProcess("broker", owns_data=True),
    StackProcess("janitor", owns_data=False, after=("ingest", "broker")),
    StackProcess("console", owns_data=False, after=("ingest", "broker"), has_pages=True),
)
"""In the order of their ports."""

STANDBYS = tuple(
    # After the others, so that those are the first owners.
    StackProcess(f"{name}-standby", owns_data=True, after=WITH_STANDBYS, standby_of=name)
    for name in WITH_STANDBYS
)

STOP_ORDER = (
    *("console", "janitor", "router"),
    *("broker-standby", "broker", "ingest-standby", "ingest"),
)
"""Callers before those that they call: the broker reads payloads from ingest while it drains. A
standby before the owner, which it would replace."""

STOP_GRACE_SECONDS = 15.0
"""More than the services' own drain time of 10 s."""

SAY_SECONDS = 10.0
"""How often a start that takes long says what it waits for."""


def parts_of(options: StackOptions) -> Sequence[StackProcess]:
    """The processes to run, in the order of their ports."""
    return (*PARTS, *STANDBYS) if options.standbys else PARTS


def programs(
    options: StackOptions,
    ports: Mapping[str, int],
    http_ports: Mapping[str, int],
    environ: Mapping[str, str],
) -> list[Program]:
    logs = options.logs

    def command(part: StackProcess) -> list[str]:
        begin = [
            *(sys.executable, "-m", f"services.{part.standby_of or part.name}"),
            *("--host", HOST, "--port", str(ports[part.name])),
            *("--parent-pid", str(os.getpid())),
            *("--http-port", str(http_ports.get(part.name, -1))),
        ]
        if part.has_pages:
            return [*begin, "--endpoint", f"{HOST}:{ports[PARTS[0].name]}"]
        place = ["--root", options.root, "--wal-store", options.wal_store]
        standby = ["--standby"] if part.owns_data and options.standbys else []
        return [*begin, *place, "--config", options.config, *standby]

    return [
        Program(
            name=part.name,
            command=command(part),
            address=f"{HOST}:{ports[part.name]}",
            environ=environment_of_services(environ),
            log=logs / f"{part.name}.log" if logs is not None else None,
            http_address=f"{HOST}:{http_ports[part.name]}" if part.name in http_ports else "",
            has_pages=part.has_pages,
            stands_by=part.owns_data and options.standbys,
        )
        for part in parts_of(options)
    ]


def page_address(program: Program) -> str:
    """Where a browser finds it."""
    scheme = "https" if tls_files(program.environ) else "http"
    return f"{scheme}://{program.address}"


class StartFailed(Exception):
    """The stack does not serve. `code` is the exit code that fits."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Stack:
    def __init__(
        self,
        parts: Sequence[StackProcess],
        what: Sequence[Program],
        root: str,
        ready_file: Path | None,
        report: Callable[[str], None],
        say_seconds: float = SAY_SECONDS,
    ) -> None:
        """`report` prints a line for people."""
        self._say_seconds = say_seconds
        self._parts = parts
        self._root = root
        self._ready_file = ready_file
        self._report = report
        self._started = False
        self._http_endpoints = {
            program.name: program.http_address for program in what if program.http_address
        }
        self.pages = {program.name: page_address(program) for program in what if program.has_pages}
        """The addresses for browsers."""
        self._members = {
            program.name: Supervised(program, report, self._on_serving) for program in what
        }
        self._runs: dict[str, asyncio.Task[None]] = {}

    @property
    def endpoints(self) -> dict[str, str]:
        """The addresses that clients connect to."""
        return {
            name: member.address for name, member in self._members.items() if name not in self.pages
        }

    async def start(self) -> None:
        """Start everything and wait until all of it serves; then the ready file is written.

        No clock bounds the wait: a service that reads much, or a busy machine, needs its time. What
        is waited for is reported. Raises StartFailed for a service that may not be started again.
        """
        starting = asyncio.create_task(self._start_all())
        try:
            while not (await asyncio.wait([starting], timeout=self._say_seconds))[0]:
                for name in self._runs:
                    if not self._members[name].serving.is_set():
                        self._report(f"waiting for {name}{self._members[name].last_words}")
            starting.result()
        finally:
            starting.cancel()
        self._started = True
        self._write_ready_file()

    async def _start_all(self) -> None:
        for stage in (False, True):
            starting = [part.name for part in self._parts if bool(part.after) is stage]
            if starting:
                self._report(f"starting {listed(starting)}")
            for name in starting:
                self._runs[name] = self._members[name].start()
            await asyncio.gather(*(self._until_serving(name) for name in starting))

    async def _until_serving(self, name: str) -> None:
        """Wait until it serves; raises where any service has ended, also one that has served."""
        serving = asyncio.ensure_future(self._members[name].serving.wait())
        try:
            await asyncio.wait([serving, *self._runs.values()], return_when="FIRST_COMPLETED")
        finally:
            serving.cancel()
        for other, run in self._runs.items():
            if run.done():
                run.result()
                raise StartFailed(f"{other} cannot run", self._members[other].refused or 1)

    async def wait_without_owners(self) -> None:
        """Return once every owner of data was refused: this stack has nothing left to serve."""
        owners = [self._runs[part.name] for part in self._parts if part.owns_data]
        # Not gather: cancelling this wait must not cancel what it waits for.
        await asyncio.wait(owners)
        for run in owners:
            run.result()

    async def stop(self, hurry: asyncio.Event) -> bool:
        """Drain and end everything, in order. Returns whether all ended by themselves."""
        if self._ready_file is not None:
            self._ready_file.unlink(missing_ok=True)
        clean = True
        for name in sorted(self._members, key=_stop_place):
            clean &= await self._members[name].stop(STOP_GRACE_SECONDS, hurry)
        await asyncio.gather(*self._runs.values(), return_exceptions=True)
        return clean

    @property
    def replaced(self) -> bool:
        """Whether every owner of data was fenced."""
        owners = [self._members[part.name] for part in self._parts if part.owns_data]
        return all(member.refused == EXIT_FENCED for member in owners)

    def _on_serving(self) -> None:
        # Process IDs are new after a restart.
        if self._started:
            self._write_ready_file()

    def _write_ready_file(self) -> None:
        if self._ready_file is None:
            return
        fields: dict[str, object] = {
            "endpoint": next(iter(self.endpoints.values())),
            "endpoints": self.endpoints,
            "pids": {"launcher": os.getpid()}
            | {name: member.pid for name, member in self._members.items()},
            "root": self._root,
        }
        fields |= self.pages
        if self._http_endpoints:
            fields["http_endpoints"] = self._http_endpoints
        whole = self._ready_file.with_name(f"{self._ready_file.name}.{os.getpid()}")
        whole.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        whole.replace(self._ready_file)


def listed(names: Sequence[str]) -> str:
    """`router`, `router and janitor`, `router, janitor and console`."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _stop_place(name: str) -> int:
    return STOP_ORDER.index(name) if name in STOP_ORDER else -1
