"""Ending with the process that started this one, even when that is killed and cannot say so."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1

LOOK_SECONDS = 0.5
"""How often to look for the parent where the kernel does not report its end."""


def end_with(parent_pid: int) -> None:
    """Have this process killed as soon as its parent is gone.

    On Linux the kernel does it, also while this process is stopped or busy; elsewhere a thread
    looks. Killed, not drained: with no caller left to wait, what matters is that it ends, and
    what was answered is durable already.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"prctl: {os.strerror(code)}")
    else:
        threading.Thread(target=_watch, args=(parent_pid,), daemon=True).start()
    # It may have died before the kernel began to watch.
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
