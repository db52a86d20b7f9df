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
