"""Ctrl-C before a command is at work, and after: it ends, and shows no one the inside."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest
import rich

from tests.integration.cli.stack import COMMAND

REPOSITORY = Path(__file__).resolve().parents[3]

SECONDS = 60


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (("tq", "append", "jobs.tq", "--lines"), "click"),
        (("tq", "append", "jobs.tq", "--lines"), "slatemq.cli.tq.entries"),
        (("consume", "jobs"), "slatemq.cli.consume.claiming"),
        (("consume", "jobs"), "grpc"),
        (("consume", "jobs"), "slatemq._rpc.peers"),
        (("import", "-"), "grpc"),
        (("import", "-"), "slatemq.textqueue"),
    ],
)
def test_ctrl_c_while_modules_are_loaded_ends_a_command_with_130(
    words: tuple[str, ...], module: str, tmp_path: Path
) -> None:
    # Given a command that tells which modules it has loaded, and a server that says nothing
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen(
            [sys.executable, "-X", "importtime", *COMMAND[1:], *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env={
                "PYTHONPATH": str(REPOSITORY),
                "SLATEMQ_ENDPOINT": f"127.0.0.1:{server.getsockname()[1]}",
            },
        ) as process,
    ):
        assert process.stderr is not None
        for line in process.stderr:
            if line.rpartition(b"|")[2].strip() == module.encode():
                break

        # When it is interrupted after one of them
        process.send_signal(signal.SIGINT)
        _, result = process.communicate(timeout=SECONDS)

    # Then it ends, without a word about itself
    assert process.returncode == 130
    assert b"Traceback" not in result
    assert b"Exception ignored" not in result


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_a_command_without_its_packages_says_what_to_install(missing: str, tmp_path: Path) -> None:
    # Given a Python without site-packages, but for one of the two
    for package in {click, rich} - {sys.modules[missing]}:
        folder = Path(package.__file__ or "").parent
        (tmp_path / folder.name).symlink_to(folder, target_is_directory=True)

    done = subprocess.run(
        [sys.executable, "-S", *COMMAND[1:], "--help"],
        capture_output=True,
        env={"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"},
        timeout=SECONDS,
        check=False,
    )

    assert done.returncode == 1
    assert b"pip install '.[cli]'" in done.stderr
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_an_import_that_reads_its_input(number: signal.Signals, code: int) -> None:
    # Given an import that has read more than a pipe holds, and waits for the rest
    with subprocess.Popen(
        [*COMMAND, "events", "import", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        process.stdin.write(bytes(1 << 20))
        process.stdin.flush()

        # When it is told to end
        process.send_signal(number)

        # Then it does
        assert process.wait(SECONDS) == code
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
