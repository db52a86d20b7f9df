"""The command lines of what works on the root of an instance without its processes."""

from __future__ import annotations

import argparse
import asyncio
import os
import pwd
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from libs.access.audit import Act
from libs.serving.process import logs
from libs.serving.process.exits import EXIT_FAILED, EXIT_USAGE
from libs.serving.requests.auditing import Auditor
from libs.storage.errors import StorageError
from slatemq.errors import SlateMQError

INTERRUPTED: Final = 130
"""After Ctrl-C: 128 and the number of the signal, as shells do it."""

SAY_S: Final = 5.0
"""Between two lines of progress where stderr is not a terminal."""

OVERWRITE_S: Final = 0.1
"""Between two of them where it is."""


def root_command(
    name: str, description: str, epilog: str, environ: Mapping[str, str]
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parser of `python -m services.janitor NAME`, and that of its arguments.

    These have `--root` and `--wal-store`; parse with `parsed`.
    """
    parser = argparse.ArgumentParser(prog="python -m services.janitor", allow_abbrev=False)
    command = parser.add_subparsers(dest="command", required=True).add_parser(
        name,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--root", default=environ.get("SLATEMQ_ROOT"), help="URL of the root")
    command.add_argument(
        "--wal-store",
        default=environ.get("SLATEMQ_WAL_STORE", ""),
        help="URL of the store that has the WALs, where it is not reached by that of the record "
        "(SLATEMQ_WAL_STORE)",
    )
    return parser, command


def parsed(
    parser: argparse.ArgumentParser, command: argparse.ArgumentParser, argv: Sequence[str]
) -> argparse.Namespace:
    """Raises SystemExit: 0 after `--help`, 2 for a wrong command line, as without a root."""
    args = parser.parse_args(argv)
    if not args.root:
        command.error("--root or SLATEMQ_ROOT is required")
    return args


def exit_code_of(does: Callable[[], int], interrupted: str) -> int:
    """Do what a command line says; returns the exit code, and says on stderr why it is not 0.

    `does` returns it where nothing is raised. `interrupted` is what to do after Ctrl-C.
    """
    try:
        return does()
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    except (SlateMQError, StorageError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted: {interrupted}\n")
        return INTERRUPTED


class ProgressLine:
    """Progress on stderr: one line that is written over on a terminal, else a line every SAY_S."""

    def __init__(self) -> None:
        self.is_terminal = sys.stderr.isatty()
        self._pause_s = OVERWRITE_S if self.is_terminal else SAY_S
        self._at = float("-inf")
        self._is_open = False

    def show(self, line: str, *, at_once: bool = False) -> None:
        """Show it; where another one was shown a moment ago, only if `at_once`."""
        now = time.monotonic()
        if not at_once and now - self._at < self._pause_s:
            return
        self._at = now
        sys.stderr.write(f"\r\x1b[K{line}" if self.is_terminal else f"{line}\n")
        sys.stderr.flush()
        self._is_open = self.is_terminal

    def keep(self) -> None:
        """Leave what is shown on the terminal."""
        self._end("\n")

    def clear(self) -> None:
        """Remove it from the terminal: what comes next begins in its place."""
        self._end("\r\x1b[K")

    def _end(self, text: str) -> None:
        if self._is_open:
            sys.stderr.write(text)
            sys.stderr.flush()
            self._is_open = False


def begin_command() -> None:
    """Begin the log; SIGTERM and SIGHUP end a command as Ctrl-C does, unless they are ignored."""
    logs.configure("janitor", "warning")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(*_: object) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of a script's `command &`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)


@contextmanager
def audited(act: str, **details: object) -> Iterator[None]:
    """Record what is done here as an act of the user of this machine, when it has ended.

    It is a line of the log alone: where the instance's processes are stopped, nothing takes events.
    """
    outcome = "FAILED"
    try:
        yield
        outcome = "OK"
    except (KeyboardInterrupt, asyncio.CancelledError):
        outcome = "CANCELLED"
        raise
    finally:
        facts = tuple(f"{name}={value}" for name, value in details.items())
        done = Act(_user(), "user", act, (), facts, "", outcome, "")
        Auditor("janitor", lambda act: None).record(done)


def _user() -> str:
    number = os.getuid()
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # as in a container
        return str(number)
