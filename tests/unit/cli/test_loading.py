"""Which modules a command loads: those take most of the time of a short one."""

import subprocess
import sys
from pathlib import Path

import click
import pytest

from slatemq.cli.app import COMMANDS, slatemq
from slatemq.cli.session import Group
from slatemq.textqueue import TextQueue

LOADED = """
import sys
from slatemq.cli.app import invoke
invoke(sys.argv[1:])
print("\\n" + " ".join(sys.modules))
"""

SERVER = {"grpc", "google.protobuf", "asyncio", "slatemq.client", "slatemq.v1"}


def loaded_by(*words: str) -> set[str]:
    """The modules of a process that has run this command line."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *words], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("line", ["--version", "--help", "tq --help", "tq ls jobs.tq", "tq next"])
def test_what_asks_no_server_loads_no_client_and_no_event_loop(line: str) -> None:
    loaded = loaded_by(*line.split())

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

    assert not loaded_by(*line.split()) & SLOW


@pytest.mark.parametrize("name", sorted({*COMMANDS} - {"import"}))
def test_the_help_of_a_command_loads_that_command_only(name: str) -> None:
    loaded = loaded_by(name, "--help")

    assert COMMANDS[name].module in loaded
    assert not loaded & {"grpc", "rich", "slatemq.client"}
    others = {"janitor", "importing", "failed_edit", "textqueue", "outbox"}
    modules = {f"slatemq.cli.{one}" for one in others} - {COMMANDS[name].module}
    assert not loaded & modules


def test_a_command_for_a_server_loads_the_client_but_no_queue_files_and_no_bars() -> None:
    loaded = loaded_by("queue", "ls", "--endpoint", "127.0.0.1:1", "--timeout", "100ms")

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
