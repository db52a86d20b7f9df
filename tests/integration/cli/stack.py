"""The command as users run it: a process of its own, against a real stack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import slatemq
from slatemq.cli.failures import EXIT_UNREACHABLE
from slatemq.sync import SyncClient
from tests.acceptance.local_stack import LocalStack, wait_until
from tests.integration.cli import ready_command

COMMAND = (sys.executable, "-m", "slatemq.cli")
RUN_SECONDS = 60

UNREACHED_MAX = 3
"""How many commands may find one stack too busy: more give up too early."""


class Result(NamedTuple):
    """How a run ended."""

    code: int
    out: bytes
    err: str

    @property
    def objects(self) -> list[Any]:
        """What it wrote as JSON lines."""
        return [json.loads(line) for line in self.out.split(b"\n") if line]


@dataclass
class Cli:
    """Runs commands; as a context manager it closes its client.

    Attributes:
        stack: Which they talk to.
        state: The folder in which they remember runs.
        unreached_count: How many found the stack too busy.
    """

    stack: LocalStack
    state: Path
    unreached_count: int = 0

    @cached_property
    def client(self) -> SyncClient:
        """For what is given, and what is waited for: a command costs a process each time."""
        return slatemq.sync.connect(self.stack.endpoint)

    def __enter__(self) -> Cli:
        return self

    def __exit__(self, *_: object) -> None:
        if "client" in vars(self):
            self.client.close()

    @property
    def environ(self) -> dict[str, str]:
        """What the command finds in its environment."""
        return {
            **os.environ,
            "SLATEMQ_ENDPOINT": self.stack.endpoint,
            "XDG_STATE_HOME": str(self.state),
        }

    def run(
        self, *arguments: str | bytes, stdin: bytes = b"", environ: Mapping[str, str] | None = None
    ) -> Result:
        """Run one to its end, in a fork of a process that has loaded the command.

        Again where the stack was too busy to tell in time where its services are: until that is
        known, a command has sent nothing. Fails where that happens more than a few times.
        """
        there = {**self.environ, **(environ or {})}
        while True:
            done = ready_command.run(arguments, there, stdin, RUN_SECONDS)
            err = done.stderr.decode()
            assert "Traceback" not in err, err
            result = Result(done.returncode, done.stdout, err)
            is_unreached = f"{self.stack.endpoint} is not reachable" in err and not result.out
            if result.code != EXIT_UNREACHABLE or not is_unreached:
                return result
            self.unreached_count += 1
            assert self.unreached_count <= UNREACHED_MAX, (self.unreached_count, result)

    def ok(self, *arguments: str | bytes, stdin: bytes = b"") -> Result:
        """Run one that is to succeed."""
        result = self.run(*arguments, stdin=stdin)
        assert result.code == 0, result
        return result

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start one and leave it running, with pipes to all its streams."""
        return subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environ,
        )

    def status(self, *options: str) -> Any:
        """What `status --json` shows, once it has everything: a busy process may answer late."""
        found: Any = None

        def is_whole() -> bool:
            nonlocal found
            code, *_ = result = self.run("status", *options, "--json")
            (found,) = result.objects
            answered = [one["serving"] and one["instance_number"] for one in found["services"]]
            return code == 0 and all(answered) and found["routes"] and not found["unlisted_brokers"]

        wait_until(is_whole, RUN_SECONDS)
        return found

    def counts(self, queue: str) -> dict[str, int]:
        """How many messages of a queue are in which state."""
        counts = asdict(self.client.get_queue(queue).counts)
        return {name: count for name, count in counts.items() if name.endswith("_count")}

    def create(self, queue: str = "", **settings: Any) -> str:
        """Creates a queue, of a name of its own unless given, whose messages come again at once."""
        queue = queue or f"q-{uuid4().hex[:8]}"
        self.client.create_queue(queue, backoff=slatemq.Backoff.none(), **settings)
        return queue
