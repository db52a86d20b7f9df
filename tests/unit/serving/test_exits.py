"""How a process ends whose store's client has threads of its own."""

from __future__ import annotations

import subprocess
import sys

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


def test_output_that_cannot_be_written_is_an_error() -> None:
    program = "from libs.serving.process.exits import exit_with\nprint('found')\nexit_with(0)"
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True
        )

    assert ended.returncode != 0
    assert "No space left" in ended.stderr
