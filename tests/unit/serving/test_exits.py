"""How a process ends whose store's client has threads of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import atexit, os
from libs.serving.process.exits import exit_with

class Thread:
    def __del__(self):
        os.abort()

thread = Thread()
atexit.register(print, "at the exit")
print("all of it")
exit_with(77)
"""


def test_a_process_ends_with_its_code_before_anything_of_it_is_taken_apart() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)

    assert (ended.returncode, ended.stdout) == (77, "all of it\nat the exit\n")


@pytest.mark.parametrize(("own", "seen"), [(0, 1), (77, 77)])
def test_output_that_cannot_be_written_is_an_error(own: int, seen: int) -> None:
    program = f"from libs.serving.process.exits import exit_with; print('x'); exit_with({own})"
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", program],
            env=buffered,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )

    assert ended.returncode == seen
    assert "the output is not whole: [Errno 28] No space left on device" in ended.stderr


def test_a_process_without_an_output_ends_with_its_code() -> None:
    program = "from libs.serving.process.exits import exit_with; exit_with(77)"
    ended = subprocess.run(["sh", "-c", f'exec {sys.executable} -c "{program}" >&- 2>&-'])

    assert ended.returncode == 77
