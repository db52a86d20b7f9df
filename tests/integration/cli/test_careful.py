"""What the command does so that a mistake loses nothing, and is noticed."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import grpc
import pytest

import slatemq
from slatemq.v1 import queue_pb2, queue_pb2_grpc
from tests.acceptance.local_stack import LocalStack, wait_until
from tests.integration.cli.ready_command import ALONE
from tests.integration.cli.stack import COMMAND, Cli

pytestmark = pytest.mark.stack

PATIENT = {ALONE: "60"}
"""For a `consume` whose messages are not to count as alone when the next one comes late."""

RUNS_MAX = 10
"""Of a `consume` that waits for a second: a message may come later than that."""


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    folder = tmp_path_factory.mktemp("careful")
    with LocalStack(folder / "stack", ready=True) as stack, Cli(stack, folder / "state") as cli:
        yield cli


@pytest.fixture
def queue(cli: Cli) -> str:
    return cli.create()


def fill(cli: Cli, queue: str, count: int) -> None:
    messages = [slatemq.OutgoingMessage(b"%d" % n, {"queue": queue}) for n in range(count)]
    cli.client.publish_batch(messages)
    wait_until(lambda: cli.counts(queue)["available_count"] == count, 60)


# --- consume --exec ---------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "status"), [("./no-such-program", 127), ("/etc/passwd", 126), ("exit 127", 127)]
)
def test_a_program_that_cannot_be_run_ends_the_command_and_costs_no_attempt(
    cli: Cli, queue: str, program: str, status: int
) -> None:
    fill(cli, queue, 20)

    done = cli.run("consume", queue, "--exec", program, "--concurrency", "4", "--wait", "30s")

    assert done.code == 2
    assert f"exit status {status}" in done.err
    counts = cli.counts(queue)
    assert counts["failed_count"] == 0
    assert counts["available_count"] == 20
    attempts = cli.ok("message", "ls", queue, "--json").objects
    assert {one["attempts_count"] for one in attempts} == {0}


def test_a_message_for_which_a_script_lacks_a_tool_becomes_a_dead_letter(
    cli: Cli, queue: str
) -> None:
    cli.ok("queue", "update", queue, "--max-attempts", "2")
    fill(cli, queue, 3)
    # Given a script that has run, and lacks a tool for the last message alone
    program = 'if [ "$(cat)" = 2 ]; then ./no-such-tool; fi'

    done = cli.run("consume", queue, "--exec", program, "--max", "4", "--wait", "60s")

    assert (done.code, "2 acked, 2 nacked" in done.err) == (0, True), done.err
    (dead_letter,) = cli.ok("failed", "ls", queue, "--json").objects
    assert "exit status 127" in dead_letter["reason"]


@pytest.mark.parametrize("how", ["mv {0} {0}-old", "chmod -x {0}"])
def test_a_script_that_goes_while_it_is_used_ends_the_command_and_costs_no_attempt(
    cli: Cli, queue: str, tmp_path: Path, how: str
) -> None:
    fill(cli, queue, 20)
    # Given a script that has run for five messages when it goes, or loses its permission
    script = tmp_path / "script"
    script.write_text(f'#!/bin/sh\n[ "$(cat)" != 4 ] || {how.format(script)}\n')
    script.chmod(0o755)

    done = cli.run("consume", queue, "--exec", str(script), "--wait", "60s", environ=PATIENT)

    assert (done.code, "5 acked, 0 nacked" in done.err) == (2, True), done.err
    counts = cli.counts(queue)
    assert (counts["available_count"], counts["failed_count"]) == (15, 0)
    attempts = cli.ok("message", "ls", queue, "--json").objects
    assert {one["attempts_count"] for one in attempts} == {0}


def test_a_message_for_which_a_script_lacks_a_tool_holds_up_none_behind_it(
    cli: Cli, queue: str
) -> None:
    cli.ok("queue", "update", queue, "--max-attempts", "1")
    fill(cli, queue, 4)
    # Given a script that lacks a tool for the first two messages, in a run of its own
    program = 'if [ "$(cat)" -lt 2 ]; then ./no-such-tool; fi'
    limits = ("--max", "4", "--wait", "60s")

    done = cli.run("consume", queue, "--exec", program, *limits, environ=PATIENT)

    assert (done.code, "2 acked, 2 nacked" in done.err) == (0, True), done.err
    assert cli.counts(queue)["failed_count"] == 2


def test_a_lone_message_for_which_nothing_shows_that_the_command_runs_ends_it_uncounted(
    cli: Cli, queue: str
) -> None:
    cli.ok("queue", "update", queue, "--max-attempts", "1")
    fill(cli, queue, 1)

    for options in ((), ("--max", "1"), ("--wait", "1s")):
        consume = ("consume", queue, "--exec", "./no-such-tool", *options)
        for _ in range(RUNS_MAX if "--wait" in options else 1):
            if (done := cli.run(*consume)).code:
                break

        assert (done.code, "no attempt was counted" in done.err) == (2, True), done.err
        (waiting,) = cli.ok("message", "ls", queue, "--json").objects
        assert waiting["attempts_count"] == 0

    # And what the advice says makes a dead letter of it
    assert "`CMD || exit 1`" in done.err
    done = cli.run("consume", queue, "--exec", "./no-such-tool || exit 1", "--max", "1")
    assert (done.code, cli.counts(queue)["failed_count"]) == (1, 1)


def test_the_end_of_stderr_is_the_reason_of_a_dead_letter(cli: Cli, queue: str) -> None:
    cli.ok("queue", "update", queue, "--max-attempts", "1")
    cli.ok("publish", "--to", queue, "x")
    program = (
        r"head -c 100000 /dev/zero | tr '\0' y >&2; echo >&2;"
        r" printf '\033[31mno such street\033[0m\r\n\tin town\n' >&2; exit 3"
    )

    done = cli.run("consume", queue, "--exec", program, "--max", "1")

    (dead_letter,) = cli.ok("failed", "ls", queue, "--json").objects
    assert dead_letter["reason"].startswith("nack: the command ended with exit status 3: …y")
    assert dead_letter["reason"].endswith("y | no such street | in town")
    assert len(dead_letter["reason"]) < 600
    assert "\x1b[31mno such street" in done.err.replace("\\x1b", "\x1b")


def test_a_program_that_leaves_another_behind_is_waited_for_no_longer(
    cli: Cli, queue: str, tmp_path: Path
) -> None:
    cli.ok("publish", "--to", queue, "x")
    program = f"sleep 300 & echo $! > {tmp_path}/pid; exit 1"

    cli.run("consume", queue, "--exec", program, "--max", "1")

    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, 0)  # It still runs: the command did not wait for its end.
    os.kill(pid, signal.SIGKILL)


def test_a_consume_in_which_all_failed_ends_with_1(cli: Cli, queue: str) -> None:
    fill(cli, queue, 2)
    assert cli.run("consume", queue, "--exec", "false", "--max", "2").code == 1
    assert cli.run("consume", queue, "--exec", 'test "$(cat)" = 1', "--max", "2").code == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_releases_what_is_in_work(
    cli: Cli, queue: str, tmp_path: Path, number: signal.Signals
) -> None:
    fill(cli, queue, 5)
    program = f"echo $$ >> {tmp_path}/pids; sleep 100"
    with cli.start("consume", queue, "--exec", program, "--concurrency", "3") as consumer:
        wait_until(
            lambda: (
                (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) == 3
            ),
            60,
        )
        consumer.send_signal(number)
        consumer.communicate(timeout=60)

    assert consumer.returncode == 128 + number
    assert cli.counts(queue)["in_flight_count"] == 0
    assert {one["attempts_count"] for one in cli.ok("message", "ls", queue, "--json").objects} == {
        0
    }


def test_a_command_that_the_shell_cannot_read_costs_no_attempt(cli: Cli, queue: str) -> None:
    fill(cli, queue, 1)
    ended = cli.run("consume", queue, "--exec", "unclosed '", "--wait", "1s")
    assert ended.code == 2
    assert "the shell cannot read the command" in ended.err
    (waiting,) = cli.ok("message", "ls", queue, "--json").objects
    assert waiting["attempts_count"] == 0


# --- publish ----------------------------------------------------------------


@pytest.mark.parametrize("how", [("text",), ("--jsonl", "-")], ids=["one", "lines"])
def test_a_publish_to_a_queue_that_does_not_exist_stores_nothing(
    cli: Cli, how: tuple[str, ...]
) -> None:
    refused = cli.run("publish", "--to", "no-such-queue", *how, stdin=b"a line\n")
    assert refused.code == 1
    assert "no-such-queue" in refused.err
    assert "--allow-unrouted" in refused.err

    assert (
        cli.run("publish", "--to", "no-such-queue", "--allow-unrouted", *how, stdin=b"x").code == 0
    )


def test_a_publish_to_a_queue_that_does_not_take_it_is_refused_and_of_lines_it_is_said(
    cli: Cli, queue: str
) -> None:
    cli.ok("queue", "update", queue, "--filter", 'headers.region == "eu"')
    refused = cli.run("publish", "--to", queue, "x")
    assert refused.code == 1
    assert f"queue '{queue}' exists, but its filter does not match" in refused.err
    assert cli.ok("publish", "--to", queue, "--header", "region=eu", "x").out.strip().isdigit()
    assert cli.ok("publish", "--to", queue, "--allow-unrouted", "x").out.strip().isdigit()

    lines = cli.ok("publish", "--to", queue, "--jsonl", "-", stdin=b"a line\n")
    assert "its filter does not match" in lines.err
    taken = ("--header", "region=eu", "--jsonl", "-")
    assert "does not match" not in cli.ok("publish", "--to", queue, *taken, stdin=b"a line\n").err


def test_a_publish_to_a_queue_in_quarantine_is_stored_and_waits(cli: Cli) -> None:
    # Given a queue whose creation broke off before it left its quarantine
    queue = f"q-{uuid4().hex[:8]}"
    partition = queue_pb2.Partition(index=0, count=1)
    with grpc.insecure_channel(cli.stack.endpoints["broker"]) as channel:
        queue_pb2_grpc.QueueServiceStub(channel).CreateQueue(
            queue_pb2.CreateQueueRequest(
                queue=queue_pb2.Queue(queue_id=queue, partition=partition), broker_shards=[0]
            )
        )

    # When a message is published to it, then it is said that it waits
    published = cli.ok("publish", "--to", queue, "x")
    assert published.out.strip().isdigit()
    assert f"queue '{queue}' is in quarantine" in published.err
    lines = cli.ok("publish", "--to", queue, "--jsonl", "-", stdin=b"a line\n")
    assert "does not match" not in lines.err

    # And it comes once the creation is repeated
    cli.ok("queue", "create", queue, "--partitions", "1")
    wait_until(lambda: cli.counts(queue)["available_count"] == 2, 60)


def test_a_publish_says_how_many_queues_take_it(cli: Cli, queue: str) -> None:
    assert f"goes to the queue {queue}" in cli.ok("publish", "--to", queue, "x").err
    cli.ok("queue", "create", f"{queue}-too", "--filter", f'headers.queue == "{queue}"')
    # Routers hear of the second queue in a moment.
    wait_until(lambda: "goes to 2 queues" in cli.ok("publish", "--to", queue, "x").err, 60)
    assert cli.ok("publish", "--to", queue, "x", "--json").objects[0]["queues_count"] == 2

    nowhere = cli.ok("publish", "--header", "of-no=use", "x")
    assert "no queue matches" in nowhere.err
    assert nowhere.out.strip().isdigit()


@pytest.mark.parametrize("how", [("x",), ("--jsonl", "-")], ids=["one", "lines"])
def test_a_delay_that_no_queue_applies_is_said(cli: Cli, queue: str, how: tuple[str, ...]) -> None:
    publish = ("publish", "--to", queue, *how)
    assert "--visible-at" in cli.ok(*publish, "--delay", "5m", stdin=b"a line\n").err
    assert "--visible-at" not in cli.ok(*publish, stdin=b"a line\n").err
    cli.ok("queue", "update", queue, "--default-delay", "1s")
    assert "--visible-at" not in cli.ok(*publish, "--delay", "5m", stdin=b"a line\n").err


def test_lines_that_no_queue_takes_are_said(cli: Cli, queue: str) -> None:
    lines = ("--jsonl", "-", "--json")
    nowhere = cli.ok("publish", "--header", "of-no=use", *lines, stdin=b"a line\n")
    assert "no queue matches" in nowhere.err
    assert nowhere.objects[0]["published_count"] == 1
    assert "no queue" not in cli.ok("publish", "--to", queue, *lines, stdin=b"a line\n").err


def test_a_dedupe_hit_is_said(cli: Cli, queue: str) -> None:
    first = cli.ok("publish", "--to", queue, "--dedupe-key", queue, "x")
    again = cli.ok("publish", "--to", queue, "--dedupe-key", queue, "x")
    assert again.out == first.out
    assert "nothing was stored" in again.err
    assert "nothing was stored" not in first.err


# --- What is shown ----------------------------------------------------------


def test_a_long_listing_has_one_head(cli: Cli, queue: str) -> None:
    fill(cli, queue, 2_100)
    listed = cli.ok("message", "ls", queue, "--limit", "0")
    lines = listed.out.decode().splitlines()
    assert lines[0].startswith("message ")
    assert len(lines) == 2_101
    assert sum(line.startswith("message ") for line in lines) == 1
    assert listed.err == ""


def test_people_are_shown_a_hundred_entries_and_that_there_are_more(cli: Cli, queue: str) -> None:
    fill(cli, queue, 101)

    # Those who do not say how many, and programs all
    by_default = cli.ok("message", "ls", queue)
    assert by_default.out.count(b"\n") == 1 + 100
    assert by_default.err == "slatemq: there are more: --limit 0 lists all of them\n"
    for_programs = cli.ok("message", "ls", queue, "--json")
    assert (len(for_programs.objects), for_programs.err) == (101, "")

    # And as many as are asked for, without a word where that is all
    some = cli.ok("message", "ls", queue, "--limit", "7")
    assert (some.out.count(b"\n"), "there are more" in some.err) == (1 + 7, True)
    assert len(cli.ok("message", "ls", queue, "--limit", "7", "--json").objects) == 7
    exactly = cli.ok("message", "ls", queue, "--limit", "101")
    assert (exactly.out.count(b"\n"), exactly.err) == (1 + 101, "")


def in_a_terminal(cli: Cli, *words: str) -> list[str]:
    """The lines that a command writes into a terminal of 80 columns, without its bold type."""
    ours, its = pty.openpty()
    environ = {**cli.environ, "COLUMNS": "80"}
    subprocess.run([*COMMAND, *words], stdout=its, env=environ, check=True, timeout=60)
    os.close(its)
    data = b""
    with suppress(OSError):  # That is how a terminal ends.
        while some := os.read(ours, 1 << 16):
            data += some
    os.close(ours)
    return re.sub(r"\x1b\[\d*m", "", data.decode()).splitlines()


def test_lists_of_queues_and_redrives_fit_80_columns(cli: Cli, queue: str) -> None:
    long = " || ".join(f'headers.region == "somewhere-{n}"' for n in range(20))
    cli.ok("queue", "create", "long-filter", "--filter", long)
    cli.ok("queue", "pause", "long-filter")
    cli.ok("failed", "redrive", queue, "--into", "long-filter")

    listed = in_a_terminal(cli, "queue", "ls")
    redrives = in_a_terminal(cli, "failed", "redrives", queue)

    assert max(map(len, listed)) <= 80
    (line,) = [line for line in listed if line.startswith("long-filter")]
    assert "(paused)" in line
    assert line.endswith("…")
    assert max(map(len, redrives)) <= 80
    assert len(redrives) == 2


def test_explaining_a_queue_that_does_not_exist_says_so(cli: Cli, queue: str) -> None:
    assert "queue nowhere does not exist" in cli.ok("explain", "--to", "nowhere").err
    assert " queues match" in cli.ok("explain", "--to", queue).err


@pytest.mark.parametrize("content", [b"", b'{"a": 1}\n{"a": 2}\n', b"# a comment\n"])
def test_an_import_of_a_file_without_entries_fails(
    cli: Cli, queue: str, tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(content)
    done = cli.run("import", str(file), "--to", queue)
    assert done.code == 2
    assert "nothing was imported" in done.err
    assert "publish --jsonl" in done.err


def test_an_import_into_a_queue_that_does_not_exist_fails_whatever_the_file_holds(
    cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "done.tq"
    file.write_bytes(b"=all of it is marked\n")
    assert cli.run("import", str(file), "--to", "nowhere").code == 1


# --- Completion -------------------------------------------------------------


def completed(words: str, endpoint: str, shell: str = "bash") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import slatemq.cli; slatemq.cli.main()"],
        env={
            **os.environ,
            "_SLATEMQ_COMPLETE": f"{shell}_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": words.split(" ")[-1]
            if shell == "fish"
            else str(len(words.split(" ")) - 1),
            "SLATEMQ_ENDPOINT": endpoint,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def answered(words: str, endpoint: str, shell: str = "bash") -> str:
    """What is completed, asked again while the server takes longer than a shell waits: a second."""
    end = time.monotonic() + 60
    while not (stdout := completed(words, endpoint, shell).stdout).strip():
        assert time.monotonic() < end, "nothing is completed"
    return stdout


@pytest.mark.parametrize(
    "words",
    ["queue show comp", "publish --to comp", "consume comp", "failed ls comp", "message ls comp"],
)
def test_queue_names_are_completed(cli: Cli, words: str) -> None:
    for name in ("completed-1", "completed-2", "other"):
        cli.run("queue", "create", name)

    result = answered(f"slatemq {words}", cli.stack.endpoint)

    assert result.split() == ["plain,completed-1", "plain,completed-2"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_the_names(cli: Cli, shell: str) -> None:
    cli.run("queue", "create", "completed-1")

    result = answered("slatemq queue show comp", cli.stack.endpoint, shell)

    assert "completed-1" in result.replace(",", "\n").splitlines()


def test_without_a_server_nothing_is_completed_and_nothing_is_said() -> None:
    done = completed("slatemq queue show comp", "127.0.0.1:1")
    assert (done.stdout.strip(), done.stderr) == ("", "")
