"""What people run on an instance now and then, with TLS, tokens and a policy."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

import slatemq
from tests.acceptance.local_stack import REPOSITORY, LocalStack
from tests.integration.cli import ready_command
from tests.integration.stack.secured import Secured

pytestmark = [pytest.mark.stack, pytest.mark.slow]  # Two stacks.

POLICY: Final[dict[str, Any]] = {
    "roles": {
        "all": [{"verbs": ["publish", "consume", "inspect", "edit", "administer", "operate"]}]
    },
    "bindings": [{"principals": ["ops"], "roles": ["all"]}],
}
RUN_S: Final = 900
"""For a command. A run with Spark takes some 20 s of processor time."""


class Operator:
    """Runs commands with the token of `ops`."""

    def __init__(self, made: Secured, stack: LocalStack) -> None:
        self._environ = {
            **os.environ,
            "SLATEMQ_ENDPOINT": stack.endpoint,
            "SLATEMQ_CA": str(made.certificates / "ca.crt"),
            "SLATEMQ_TOKEN": made.tokens["ops"].token,
            ready_command.REACH: str(RUN_S),
            "XDG_STATE_HOME": str(made.folder / "state"),
        }

    async def run(self, *words: str) -> list[Any]:
        """What `slatemq` writes; it must exit with 0."""
        command = [sys.executable, "-m", ready_command.MODULE, "--json", *words]
        out = await asyncio.to_thread(output_of, command, self._environ)
        return [json.loads(line) for line in out.splitlines()]

    async def job(self, *words: str) -> dict[str, int]:
        """The counts of a run that is done."""
        (run,) = await self.run("janitor", "run", *words)
        assert run["state"] == "done", run
        counts: dict[str, int] = run["counts"]
        return counts


def output_of(command: list[str], environ: dict[str, str]) -> str:
    ended = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_S,
    )
    assert ended.returncode == 0, (command, ended.stdout, ended.stderr)
    return ended.stdout


@contextmanager
def restarted(made: Secured, data: Path) -> Iterator[LocalStack]:
    """Another stack, on this data and with the files of the first one."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in made.environ.items():
            patch.setenv(name, value)
        with LocalStack(data.parent, ready=True) as stack:
            yield stack


async def payload_of(client: slatemq.Client, queue_id: str) -> bytes:
    (message,) = await client.claim(queue_id, wait=60)
    await message.ack()
    return message.payload


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Secured, LocalStack]]:
    made = Secured(tmp_path_factory.mktemp("secured"), POLICY, ("ops",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLATEMQ_BACKUP_ROOT", backups_of(made))
        with made.running() as stack:
            yield made, stack


def backups_of(made: Secured) -> str:
    return (made.folder / "backups").as_uri()


async def test_queue_files_verification_repair_and_backups_work_with_tls_and_tokens(
    secured: tuple[Secured, LocalStack],
) -> None:
    made, stack = secured
    operator = Operator(made, stack)
    async with slatemq.connect(stack.endpoint, credentials=made.credentials("ops")) as client:
        for queue_id in ("orders", "copied"):
            await client.create_queue(queue_id)
        await client.publish(b"one lamp", {"queue": "orders"})

        file = made.folder / "orders.tq"
        async with asyncio.timeout(60):
            while (await client.get_queue("orders")).counts.available_count == 0:
                await asyncio.sleep(0.05)
        await operator.run("export", "orders", "--state", "available", "--out", str(file))
        assert "one lamp" in file.read_text()
        await operator.run("import", str(file), "--to", "copied")
        assert await payload_of(client, "copied") == b"one lamp"

        (verified,) = await operator.run("verify")
        assert verified["counts"]["messages"] == 2
        assert verified["counts"]["faults"] == 0
        await operator.run("repair")
        assert (await operator.job("backup"))["objects_copied"] > 0

    root = made.folder / "restored" / "data"
    root.parent.mkdir()
    restoring = [sys.executable, "-m", "services.janitor", "backup", "restore"]
    restored = [*restoring, "--backups", backups_of(made), "--root", root.as_uri()]
    await asyncio.to_thread(output_of, restored, dict(os.environ))
    with restarted(made, root) as again:
        async with slatemq.connect(again.endpoint, credentials=made.credentials("ops")) as client:
            assert await payload_of(client, "orders") == b"one lamp"


@pytest.mark.proof
async def test_dead_letters_are_archived_and_restored_with_tls_and_tokens(
    secured: tuple[Secured, LocalStack],
) -> None:
    """Spark starts for each job.

    The short forms are the backup above, a job as well, and what a session gives to Spark's workers
    (tests/unit/janitor/test_session.py).
    """
    made, stack = secured
    operator = Operator(made, stack)
    async with slatemq.connect(stack.endpoint, credentials=made.credentials("ops")) as client:
        await client.create_queue("broken", max_attempts=1)
        await client.create_queue("fixed")
        contents = [b"in the log", bytes(100_000)]  # The second is an object of its own.
        for content in contents:
            await client.publish(content, {"queue": "broken"})
            (message,) = await client.claim("broken", wait=60)
            await message.nack("no")

        archived = await operator.job("dead-letters", "--older-than", "0s", "--queue", "broken")
        assert archived["dead_letters_archived"] == 2
        counts = (await client.get_queue("broken")).counts
        assert (counts.failed_count, counts.archived_count) == (0, 2)
        read = [one.message async for one in client.read_archived("broken")]
        assert sorted([one.payload for one in read if one], key=len) == contents

        restored = await operator.job("restore", "--queue", "broken", "--into", "fixed")
        assert restored["dead_letters_restored"] == 2
        came = [await payload_of(client, "fixed") for _ in contents]
        assert sorted(came, key=len) == contents


@pytest.mark.proof
@pytest.mark.parametrize("job", ["retention", "done", "report"])
async def test_a_job_with_spark_asks_the_owners_of_shards_with_tls_and_tokens(
    secured: tuple[Secured, LocalStack], job: str
) -> None:
    made, stack = secured
    await Operator(made, stack).job(job)
