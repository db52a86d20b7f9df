"""`slatemq top` and the rates of `slatemq status`, against a real stack."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.local_stack import LocalStack, wait_until
from tests.integration.cli.stack import COMMAND, Cli

pytestmark = pytest.mark.stack

EVENTUALLY_S = 60


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    folder = tmp_path_factory.mktemp("monitor")
    with LocalStack(folder / "stack", ready=True) as stack, Cli(stack, folder / "state") as cli:
        yield cli


class Terminal:
    """A command in a terminal of its own, and what it has written there."""

    def __init__(self, cli: Cli, *words: str) -> None:
        self._ours, its = pty.openpty()
        self.resize(24, 100)
        self.modes = termios.tcgetattr(its)
        environ = {**cli.environ, "TERM": "xterm"}
        self.process = subprocess.Popen(
            [*COMMAND, *words], stdin=its, stdout=its, stderr=its, env=environ, process_group=0
        )
        self._its = its
        self.said = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait_for(self, is_there: Callable[[str], object]) -> None:
        """Until what was written since the last wait is as wanted."""
        self.said = ""

        def read() -> object:
            while select.select([self._ours], [], [], 0.1)[0]:
                self.said += os.read(self._ours, 1 << 16).decode(errors="replace")
                if is_there(re.sub(r"\x1b\[[\d;]*m", "", self.said)):
                    return True
            return is_there(self.said)

        wait_until(read, EVENTUALLY_S)

    def end(self) -> int:
        """The exit code, once it has ended; the terminal is as it was before."""
        self.wait_for(lambda _: self.process.poll() is not None)
        code = self.process.wait(EVENTUALLY_S)
        assert termios.tcgetattr(self._its) == self.modes
        os.close(self._its)
        os.close(self._ours)
        return code


def test_rates_are_measured_over_the_time_that_is_asked_for(cli: Cli) -> None:
    queue = cli.create()
    cli.client.publish(b"one", {"queue": queue})
    wait_until(lambda: cli.counts(queue)["available_count"] == 1, EVENTUALLY_S)
    (message,) = cli.client.claim(queue, wait=60)
    message.ack()

    totals = cli.client.get_queue(queue).totals

    def rates() -> set[float | None]:
        status = cli.status("--rates", "500ms")
        (found,) = [one for one in status["queues"] if one["queue_id"] == queue]
        return set(found["rates"].values())

    assert (totals.entered_count, totals.claimed_count, totals.acked_count) == (1, 1, 1)
    # A broker that is busy may answer too late to be in a sample.
    wait_until(lambda: rates() == {0.0}, EVENTUALLY_S)
    shown = ("status", "--rates", "500ms")
    wait_until(lambda: "in/s  out/s" in cli.ok(*shown).out.decode(), EVENTUALLY_S)
    assert "rates" not in cli.status()["queues"][0]


def test_messages_that_are_put_back_do_not_count_as_new_ones(cli: Cli) -> None:
    queue = cli.create()
    cli.client.publish(b"one", {"queue": queue})
    wait_until(lambda: cli.counts(queue)["available_count"] == 1, EVENTUALLY_S)
    (message,) = cli.client.claim(queue, wait=60)
    message.nack("not now")
    (again,) = cli.client.claim(queue, wait=60)
    again.ack()

    totals = cli.client.get_queue(queue).totals

    assert (totals.entered_count, totals.claimed_count) == (1, 2)
    assert (totals.acked_count, totals.requeued_count) == (1, 1)


def test_without_a_terminal_it_prints_one_table(cli: Cli) -> None:
    queue = cli.create()
    lines: list[str] = []
    look: dict[str, Any] = {}

    # A broker that is busy may answer a look too late to be in it.
    def is_printed() -> bool:
        lines[:] = cli.ok("top", "--interval", "500ms").out.decode().splitlines()
        return any(line.startswith(queue) for line in lines)

    def found() -> list[tuple[float | None, ...]]:
        look.update(*cli.ok("--json", "top", "--once", "--interval", "500ms").objects)
        names = ("in_per_s", "available_count", "lag_count")
        return [tuple(map(one.get, names)) for one in look["queues"] if one["queue_id"] == queue]

    wait_until(is_printed, EVENTUALLY_S)
    wait_until(lambda: found() == [(0.0, 0, 0)], EVENTUALLY_S)

    assert lines[0].split() == [
        *("queue", "in/s", "out/s", "retry/s", "waiting", "delayed", "flight", "failed"),
        *("oldest", "lag"),
    ]
    assert {one["service"] for one in look["services"]} >= {"ingest", "router", "broker"}


def test_each_look_asks_no_process_to_read_the_store(cli: Cli) -> None:
    assert cli.status()["instance_number"]
    assert not cli.client.status(settings=False).instance_number


def test_an_interval_that_would_hold_up_brokers_is_refused(cli: Cli) -> None:
    refused = cli.run("top", "--interval", "100ms")

    assert (refused.code, "at least 500ms" in refused.err) == (2, True)


def test_a_terminal_shows_it_live_and_is_given_back(cli: Cli) -> None:
    queue = cli.create()
    terminal = Terminal(cli, "top", "--interval", "500ms")
    terminal.wait_for(lambda said: queue in said and "serving" in said)

    # What is published is seen
    cli.client.publish(b"one", {"queue": queue})
    terminal.press(f"/{queue}\r")
    terminal.wait_for(lambda said: re.search(rf"{queue} .* 1 +0 +0 +0 ", said))

    # Another size is drawn at once, also while it is paused; q ends it
    terminal.press("p")
    terminal.wait_for(lambda said: "PAUSED" in said)
    terminal.resize(10, 50)
    os.killpg(terminal.process.pid, signal.SIGWINCH)
    terminal.wait_for(lambda said: "PAUSED" in said)
    terminal.press("q")
    assert terminal.end() == 0


def test_ctrl_c_gives_the_terminal_back(cli: Cli) -> None:
    terminal = Terminal(cli, "top")
    terminal.wait_for(lambda said: "serving" in said)

    terminal.process.send_signal(signal.SIGINT)

    assert terminal.end() == 130


def test_a_stack_that_does_not_answer_is_an_error_at_the_start(cli: Cli, tmp_path: Path) -> None:
    missing = cli.run("top", "--once", environ={"SLATEMQ_ENDPOINT": "127.0.0.1:1"})

    assert (missing.code, missing.out) == (3, b"")


def test_a_stack_that_is_well_is_found_so(cli: Cli) -> None:
    found: list[Any] = []
    shown = ""

    # A machine that has much else to do is found slow at times.
    def is_well() -> bool:
        nonlocal found, shown
        found = cli.run("--json", "doctor").objects
        code, out, _ = cli.run("doctor")
        shown = out.decode()
        # The disk is that of the machine on which the tests run.
        levels = {one["level"] for one in found if one["check"] != "disk"}
        words = ("conditional writes hold", "none beyond its log")
        return code == 0 and levels == {"ok"} and all(one in shown for one in words)

    wait_until(is_well, EVENTUALLY_S)
    assert {one["check"] for one in found} >= {"processes", "clocks", "store", "compaction", "disk"}
    # A process whose answer was too late goes on with its test of the store.
    probe = cli.stack.folder / "data" / "probe"
    wait_until(lambda: not list(probe.iterdir()), EVENTUALLY_S)


def test_a_process_that_does_not_answer_is_a_problem(cli: Cli) -> None:
    broker = cli.stack.pids["broker"]
    os.kill(broker, signal.SIGSTOP)
    try:
        sick = cli.run("--json", "doctor")
    finally:
        os.kill(broker, signal.SIGCONT)

    problems = [one for one in sick.objects if one["level"] == "problem"]
    assert sick.code == 1
    # Others that are busy may not have answered in time either.
    assert any("broker 0" in one["text"] for one in problems if one["check"] == "processes")
    assert any("log" in one["advice"] for one in problems if one["check"] == "topology")


def test_a_lost_record_of_the_instance_is_a_problem_and_none_is_made_in_its_place(cli: Cli) -> None:
    record = cli.stack.folder / "data" / "instance"
    record.rename(record.with_name("instance.away"))
    try:
        sick = cli.run("--json", "doctor")
        # As one that is started again would; a janitor has no shard that it could take.
        janitor = [sys.executable, "-m", "services.janitor", "--root", record.parent.as_uri()]
        ended = subprocess.run(
            [*janitor, "--port", "0"], capture_output=True, text=True, timeout=EVENTUALLY_S
        )
        assert not record.exists()
    finally:
        record.with_name("instance.away").rename(record)

    (found,) = (one for one in sick.objects if one["check"] == "settings")
    assert (sick.code, found["level"]) == (1, "problem")
    assert "no process can read the instance record" in found["text"]
    assert (ended.returncode, "restore the folder `instance/`" in ended.stderr) == (2, True)
