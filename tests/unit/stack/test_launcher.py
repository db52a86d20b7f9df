"""Who has the folder of a stack, where several start on it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from libs.serving.process.exits import EXIT_FAILED
from services.stack.launcher import LOCK_NAME, _other_launcher, _take_over, run
from services.stack.ports import HOST


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_of_two_that_take_over_the_same_stack_one_does(tmp_path: Path, held: ExitStack) -> None:
    # Given a stack that two others have found on the folder
    assert _other_launcher(tmp_path, held) == ""
    (tmp_path / LOCK_NAME).write_text("7")

    assert _take_over(tmp_path, "7", held) == ""
    assert _take_over(tmp_path, "7", held) == str(os.getpid())

    # Then a third one finds the one that took it
    assert _other_launcher(tmp_path, held) == str(os.getpid())


def test_who_takes_over_with_the_ports_of_the_other_learns_whose_they_are(
    tmp_path: Path, held: ExitStack, capfd: pytest.CaptureFixture[str]
) -> None:
    _other_launcher(tmp_path, held)
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        arguments = ["--data", str(tmp_path), "--ports", str(port), "--take-over"]

        assert run(arguments, {}) == EXIT_FAILED

    beside = f"a stack runs on {tmp_path} already (process {os.getpid()}): port {port} on {HOST}"
    assert beside in capfd.readouterr().err
    assert _other_launcher(tmp_path, held) == str(os.getpid())
