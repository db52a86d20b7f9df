"""`slatemq janitor` as a process of its own, also at a terminal."""

from __future__ import annotations

import asyncio
import codecs
import json
import os
import pty
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integration.cli import ready_command
from tests.integration.ingest.server import ROOT
from tests.integration.janitor.runs.janitors import WAIT_S, Janitor, Run, janitor, until

COMMAND = (sys.executable, "-m", ready_command.MODULE, "janitor")


class Result(NamedTuple):
    code: int | None
    out: str
    err: str


async def cli(there: Janitor, *arguments: str) -> Result:
    words = ("janitor", *arguments)
    ended = await asyncio.to_thread(ready_command.run, words, there.environ, b"", WAIT_S)
    return Result(ended.returncode, ended.stdout.decode(), ended.stderr.decode())


async def test_a_run_is_reported_with_what_it_did(tmp_path: Path) -> None:
    async with janitor(tmp_path) as there:
        result = await cli(there, "run", "retention", "--queue", "quick", "--dry-run")
        run_id = result.err.split()[2]

        assert result.code == 0, result
        assert f"run {run_id} is requested" in result.err
        assert f"run {run_id} is done after" in result.out
        assert "(dry run: nothing was changed)" in result.out
        assert "\n  messages purged: 7\n    of orders: 4\n" in result.out
        assert "\n  looking: 500ms\n" in result.out
        assert "\n  wrote reports/a.html\n" in result.out
        assert (await cli(there, "show", run_id)).out == result.out

        as_json = json.loads((await cli(there, "show", run_id, "--json")).out)
        assert as_json["counts"] == {"messages_purged": 7, "messages_purged/orders": 4}
        assert as_json["phases"] == [{"phase": "looking", "took_ms": 500}]
        assert (as_json["state"], as_json["dry_run"]) == ("done", True)

        listed = await cli(there, "runs")
        assert run_id in listed.out
        assert "7 messages purged" in listed.out
        assert "orders" not in listed.out
        assert (await cli(there, "runs", "done", "--json")).out == ""


@pytest.mark.parametrize(("queue", "said"), [("fails", "broker 0 is down"), ("breaks", "a fault")])
async def test_a_run_that_fails_is_exit_code_1(tmp_path: Path, queue: str, said: str) -> None:
    async with janitor(tmp_path) as there:
        result = await cli(there, "run", "done", "--queue", queue)

    assert result.code == 1
    assert " is failed " in result.out
    assert said in result.err


async def test_a_run_is_begun_without_waiting_followed_and_cancelled(tmp_path: Path) -> None:
    async with janitor(tmp_path) as there:
        begun = await cli(there, "run", "retention", "--queue", "slow", "--no-wait")
        run_id = begun.out.strip()
        await there.under_way(run_id)

        again = await cli(there, "run", "retention")
        assert again.code == 1
        assert f"slatemq janitor show {run_id} --follow" in again.err
        shown = await cli(there, "show", run_id)
        assert f"run {run_id} is running" in shown.out
        assert "waiting (1 of 1)" in shown.out

        following = asyncio.create_task(cli(there, "show", run_id, "--follow"))
        await asyncio.sleep(0.5)
        cancelled = await cli(there, "cancel", run_id)
        assert cancelled.code == 0
        assert f"run {run_id} is cancelled" in cancelled.out
        followed = await following
        assert followed.code == 1
        assert f"run {run_id} is cancelled" in followed.out
        assert (await cli(there, "show", run_id, "--follow")).code == 1
        assert (await cli(there, "show", run_id)).code == 0
        assert (await cli(there, "cancel", run_id)).code == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("run", "sweep"), "'sweep' is not one of"),
        (("run", "report", "--days", "0"), "--days"),
        (("run", "dead-letters", "--older-than", "30"), "is not a valid duration"),
        (("run", "restore", "--id", "x"), "is not a valid message ID"),
        (("runs", "--limit", "0"), "--limit"),
    ],
)
async def test_wrong_usage_is_exit_code_2(tmp_path: Path, line: tuple[str, ...], said: str) -> None:
    result = await cli(Janitor(tmp_path), *line)

    assert result.code == 2
    assert said in result.err


async def test_what_the_janitor_refuses_is_exit_code_1(tmp_path: Path) -> None:
    async with janitor(tmp_path) as there:
        refused = await cli(there, "run", "unreferenced", "--queue", "orders")
        unknown = await cli(there, "show", "20260101-000000-000-done-abcdef")
        ended = await cli(there, "run", "done", "--older-than", "1d", "--json")

    assert refused.code == unknown.code == ended.code == 1
    assert "queue_ids: not supported: unreferenced" in refused.err
    assert "`slatemq janitor runs` lists the runs" in unknown.err
    assert json.loads(ended.err)["error"]["field"] == "older_than_s"


class Terminal:
    """The command at a terminal of its own."""

    def __init__(self, there: Janitor, *arguments: str) -> None:
        self.shown = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._master, slave = pty.openpty()
        self._there = there
        self._arguments = arguments
        self._slave = slave
        self._closed = asyncio.Event()
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *(*COMMAND, *self._arguments),
            cwd=ROOT,
            env={**self._there.environ, "TERM": "xterm"},
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
        )
        os.close(self._slave)
        asyncio.get_running_loop().add_reader(self._master, self._read)

    def _read(self) -> None:
        try:
            self.shown += self._decoder.decode(os.read(self._master, 4096))
        except OSError:  # The other side has closed it.
            asyncio.get_running_loop().remove_reader(self._master)
            self._closed.set()

    def write(self, text: str) -> None:
        os.write(self._master, text.encode())

    async def ended(self) -> int:
        assert self.process is not None
        code = await asyncio.wait_for(self.process.wait(), WAIT_S)
        await asyncio.wait_for(self._closed.wait(), WAIT_S)
        os.close(self._master)
        return code


@pytest.mark.parametrize(
    ("answer", "code", "state"),
    [("\n", 130, Run.STATE_RUNNING), ("y\n", 1, Run.STATE_CANCELLED)],
)
async def test_ctrl_c_asks_whether_the_run_goes_on(
    tmp_path: Path, answer: str, code: int, state: int
) -> None:
    async with janitor(tmp_path) as there:
        # Given a terminal that shows the bar of a run
        terminal = Terminal(there, "run", "retention", "--queue", "slow")
        await terminal.start()
        assert terminal.process is not None
        await until(lambda: "waiting (1 of 1)" in terminal.shown)
        run_id = terminal.shown.split("run ")[1].split()[0]

        # When they press Ctrl-C, and answer
        terminal.process.send_signal(signal.SIGINT)
        await until(lambda: "Cancel it? [y/N]" in terminal.shown)
        terminal.write(answer)

        # Then the run is what they want it to be
        assert await terminal.ended() == code
        assert (await there.get(run_id)).state == state
        if code == 130:
            assert f"slatemq janitor show {run_id} --follow" in terminal.shown


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal now."""
    caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
    return bool(int(caught, 16) >> (number - 1) & 1)


async def test_without_a_terminal_ctrl_c_lets_the_run_go_on(tmp_path: Path) -> None:
    async with janitor(tmp_path) as there:
        started = await asyncio.create_subprocess_exec(
            *(*COMMAND, "run", "done", "--queue", "slow"),
            cwd=ROOT,
            env=there.environ,
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        assert started.stderr is not None
        run_id = (await started.stderr.readline()).decode().split()[2]
        await there.under_way(run_id)
        await until(lambda: catches(started.pid, signal.SIGTERM))
        started.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(started.communicate(), WAIT_S)

        assert started.returncode == 130
        assert "the run continues" in err.decode()
        assert (await there.get(run_id)).state == Run.STATE_RUNNING
