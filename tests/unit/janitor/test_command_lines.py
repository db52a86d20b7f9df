"""What the commands of the janitor leave in the log, and show of their progress."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import pwd
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from libs.serving.process.logs import AUDIT_LOGGER
from services.janitor import command_lines
from services.janitor.command_lines import ProgressLine, audited
from slatemq.errors import FailedPrecondition


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "OK"),
        (FailedPrecondition("RUNNING", "it runs"), "FAILED"),
        (OSError("a fault"), "FAILED"),
        (KeyboardInterrupt(), "CANCELLED"),
        (asyncio.CancelledError(), "CANCELLED"),  # what Ctrl-C is within asyncio.run
    ],
)
def test_what_a_command_does_is_an_act_of_its_user(
    caplog: pytest.LogCaptureFixture, error: BaseException | None, outcome: str
) -> None:
    caplog.set_level(logging.INFO, AUDIT_LOGGER)

    expected = pytest.raises(type(error)) if error is not None else nullcontext()
    with expected, audited("give-up", root="s3://key:SECRET@b", shard="broker/1"):
        if error is not None:
            raise error

    (record,) = caplog.records
    facts = vars(record)
    assert facts["principal"] == pwd.getpwuid(os.getuid()).pw_name
    assert (facts["source"], facts["proof"], facts["act"]) == ("janitor", "user", "give-up")
    assert (facts["details"], facts["outcome"]) == ("root=s3://***@b, shard=broker/1", outcome)


SIGNALLED = """
import asyncio, os, runpy, sys
from services.janitor.giving_up import command

number = int(sys.argv.pop())

async def give_up(*_):
    os.kill(os.getpid(), number)
    await asyncio.Event().wait()

command.give_up = give_up
runpy.run_module("services.janitor", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("number", "interrupts"),
    [
        (signal.SIGINT, signal.SIG_DFL),
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGTERM, signal.SIG_IGN),
    ],
)
def test_a_command_that_a_signal_ends_is_an_act_that_was_cancelled(
    number: signal.Signals, interrupts: signal.Handlers, tmp_path: Path
) -> None:
    """As Ctrl-C does, `kubectl delete job` and the end of a terminal, also of `command &`."""

    def begin() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # These tests may run under `nohup`.
        signal.signal(signal.SIGINT, interrupts)

    words = ("give-up", "--yes", "--root", tmp_path.as_uri(), "broker/1", str(int(number)))
    ended = subprocess.run(
        [sys.executable, "-c", SIGNALLED, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        preexec_fn=begin,
    )

    assert ended.returncode == 130, ended.stderr
    assert "act=give-up" in ended.stderr
    assert "outcome=CANCELLED" in ended.stderr
    assert "Traceback" not in ended.stderr


class Screen(io.StringIO):
    """A standard error stream that may be a terminal."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def test_progress_is_written_over_on_a_terminal_and_gone_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Screen(is_terminal=True)
    monkeypatch.setattr(sys, "stderr", screen)
    line = ProgressLine()

    line.show("reading ingest/0")
    line.show("reading broker/0", at_once=True)
    line.clear()
    line.clear()

    assert screen.getvalue() == "\r\x1b[Kreading ingest/0\r\x1b[Kreading broker/0\r\x1b[K"


def test_progress_that_is_no_terminal_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Screen(is_terminal=False)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(command_lines, "SAY_S", float("inf"))
    line = ProgressLine()

    line.show("reading ingest/0")
    line.show("reading broker/0")
    line.show("done", at_once=True)
    line.keep()

    assert screen.getvalue() == "reading ingest/0\ndone\n"
