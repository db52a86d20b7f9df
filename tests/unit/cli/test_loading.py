"""Which modules a command loads: those take most of the time of a short one."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import pytest

from slatemq.cli.app import COMMANDS, slatemq
from slatemq.cli.session import Group
from slatemq.textqueue import TextQueue

LOADED = """
import os, sys
from slatemq.cli.app import invoke
for line in sys.argv[1:]:
    if os.fork() == 0:
        invoke(line.split())
        print("\\n" + line + ": " + " ".join(sys.modules), flush=True)
        os._exit(0)
    if os.wait()[1]:
        sys.exit(line + " failed")
"""

SERVER = {"grpc", "google.protobuf", "asyncio", "slatemq.client", "slatemq.v1"}


def all_loaded_by(lines: Sequence[str]) -> dict[str, set[str]]:
    """The modules of processes that have each run one of these command lines."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *lines], capture_output=True, text=True, check=True
    )
    found = {}
    for said in done.stdout.splitlines():
        line, _, modules = said.partition(": ")
        if line in lines:
            found[line] = set(modules.split())
    assert found.keys() == set(lines)
    return found


def loaded_by(line: str) -> set[str]:
    return all_loaded_by([line])[line]


@pytest.mark.parametrize("line", ["--version", "--help", "tq --help", "tq ls jobs.tq", "tq next"])
def test_what_asks_no_server_loads_no_client_and_no_event_loop(line: str) -> None:
    loaded = loaded_by(line)

    assert "click" in loaded
    assert not loaded & {*SERVER, "rich"}
    assert ("slatemq.textqueue" in loaded) == line.startswith("tq")


SLOW = {
    "_hashlib", "glob", "lzma", "pathlib", "secrets", "shutil", "slatemq.cli.queue_options",
    "slatemq.textqueue.split", "socket",
}  # fmt: skip
"""What takes a short command milliseconds to load, and is for others."""


@pytest.mark.parametrize(
    "line", ["--version", "tq ls jobs.tq", "tq ls jobs.tq --json", "tq next jobs.tq"]
)
def test_a_short_command_loads_nothing_that_only_others_need(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TextQueue(tmp_path / "jobs.tq").append("one")
    monkeypatch.chdir(tmp_path)

    assert not loaded_by(line) & SLOW


def test_the_help_of_a_command_loads_that_command_only() -> None:
    helps = {f"{name} --help": name for name in sorted({*COMMANDS} - {"import"})}

    for line, loaded in all_loaded_by([*helps]).items():
        module = COMMANDS[helps[line]].module
        assert module in loaded, line
        assert not loaded & {"grpc", "rich", "slatemq.client"}, line
        others = {"janitor", "importing", "failed_edit", "textqueue", "outbox"}
        assert not loaded & {f"slatemq.cli.{one}" for one in others} - {module}, line


def test_a_command_for_a_server_loads_the_client_but_no_queue_files_and_no_bars() -> None:
    loaded = loaded_by("queue ls --endpoint 127.0.0.1:1 --timeout 100ms")

    assert {"grpc", "slatemq.client"} <= loaded
    assert not loaded & {"rich", "slatemq.textqueue", "slatemq.cli.publish.publishing"}


def test_every_line_of_a_list_of_commands_is_the_first_of_its_help() -> None:
    groups: list[Group] = [slatemq]
    seen = 0
    while groups:
        group = groups.pop()
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            if name in group.places:
                assert group.places[name].summary == command.get_short_help_str(limit=500)
                seen += 1
            if isinstance(command, Group):
                groups.append(command)
    assert seen == len(COMMANDS) + 1


TIMES_PYTHON_MAX = 8
"""It takes 4 to 5 times as much as an empty program; with the client, 12 to 16 times."""


def processor_s(program: str) -> float:
    """The processor time of a run of Python.

    Of the system as well: the kernel divides the time of a short process by few samples.
    """
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return used.ru_utime + used.ru_stime


def test_the_version_takes_little_more_processor_time_than_python_itself() -> None:
    run = "import sys, slatemq.cli; sys.argv[1:] = ['--version']; slatemq.cli.main()"

    # In turns, and the least of each: what else a machine does only adds to it.
    took = [(processor_s(run), processor_s("pass")) for _ in range(5)]
    assert min(took)[0] < TIMES_PYTHON_MAX * min(empty for _, empty in took)
