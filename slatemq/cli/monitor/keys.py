"""The keys that are pressed in a terminal, and the modes in which it is meanwhile."""

from __future__ import annotations

import os
import re
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

SEQUENCES: Final = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1b[C": "right",
    "\x1b[D": "left",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1bOC": "right",
    "\x1bOD": "left",
    "\x1b[5~": "pageup",
    "\x1b[6~": "pagedown",
    "\x1b[H": "home",
    "\x1b[1~": "home",
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\b": "backspace",
}

_KEY: Final = re.compile(r"\x1b\[[\d;]*[A-Za-z~]|\x1bO[A-Z]|.", re.DOTALL)


def keys_in(data: bytes) -> list[str]:
    """The keys in what a terminal has sent: characters, and names such as `up`.

    Sequences of keys that have no name here are left out.
    """
    found = _KEY.findall(data.decode(errors="ignore"))
    return [SEQUENCES.get(key, key) for key in found if key in SEQUENCES or len(key) == 1]


def read_keys(terminal: int) -> list[str]:
    """The keys pressed so far; raises EOFError when the terminal is gone."""
    data = os.read(terminal, 1024)
    if not data:
        raise EOFError
    return keys_in(data)


class Keyboard:
    """A terminal that sends each key at once, and shows none; Ctrl-C and Ctrl-Z are signals."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._before: list[Any] = termios.tcgetattr(terminal)

    def take(self) -> None:
        tty.setcbreak(self._terminal)

    def restore(self) -> None:
        termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._before)

    @contextmanager
    def taken(self) -> Iterator[None]:
        self.take()
        try:
            yield
        finally:
            self.restore()
