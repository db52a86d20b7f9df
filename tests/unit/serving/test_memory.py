"""The bound on malloc's arenas."""

import platform
import subprocess
import sys

import pytest

# Threads that allocate and live at the same time get an arena each, unless there is a bound.
PROGRAM = """
import ctypes, re, sys, threading
from libs.serving.memory import bound_arenas
if sys.argv[1] == "bounded":
    assert bound_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
together = threading.Barrier(8)
def work():
    libc.malloc(4096)
    together.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.malloc_stats()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has arenas")
def test_threads_share_two_arenas() -> None:
    def arenas(bound: str) -> int:
        told = subprocess.run(
            [sys.executable, "-c", PROGRAM, bound], capture_output=True, text=True, check=True
        )
        return told.stderr.count("Arena ")

    assert arenas("bounded") <= 2 < arenas("free")
