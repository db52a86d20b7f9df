"""The command `python -m services`: checks before the start, lines for people, the exit code."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from libs.serving.process.exits import EXIT_CLEAN, EXIT_FAILED, EXIT_FENCED
from libs.storage.objects.durability import full_disk
from services.stack.options import StackOptions, parse, variables_without_effect
from services.stack.ports import PortInUse, choose_ports
from services.stack.stack import PARTS, Stack, StartFailed, parts_of, programs
from slatemq.variables import unknown_variables

DEFAULT_ENDPOINT = "127.0.0.1:7420"
"""Where clients look that are given no address."""

LOCK_NAME = "launcher.lock"
"""A file in the data folder that a running launcher has locked, with its process ID."""

_END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the local stack until it is asked to stop; returns the exit code (see `--help`)."""
    options = parse(argv, len(PARTS), environ)
    parts = parts_of(options)
    for warning in (unknown_variables(environ), variables_without_effect(environ)):
        if warning:
            report(f"warning: {warning}")
    with ExitStack() as held:
        flag, beside = "--ports", ""
        try:
            _prepare_folders(options)
            other = _other_launcher(options.data, held)
            if other:
                beside = f"a stack runs on {options.data} already (process {other}): "
                if not options.take_over:
                    report(
                        f"{beside}stop it, or give --take-over, and with it other --ports, and "
                        "this one takes its data"
                    )
                    return EXIT_FAILED
            if options.ready_file is not None:
                # A script that waits for it must not find that of an earlier run.
                options.ready_file.unlink(missing_ok=True)
            names = [part.name for part in parts]
            ports = choose_ports(options.ports, names)
            http_ports: dict[str, int] = {}
            if options.http_ports is not None:
                flag = "--http-ports"
                http_ports = choose_ports(options.http_ports or None, names, ports.values())
            if other and options.data is not None:
                taker = _take_over(options.data, other, held)
                if taker:
                    report(
                        f"process {taker} has taken over {options.data} meanwhile: stop it first"
                    )
                    return EXIT_FAILED
        except PortInUse as error:
            report(f"{beside}{error}: stop what listens there, or give other {flag}")
            return EXIT_FAILED
        except OSError as error:
            why = f"cannot write to {error.filename or options.data}: {error.strerror}"
            report(why + full_disk(options.data, why))
            return EXIT_FAILED
        what = programs(options, ports, http_ports, environ)
        stack = Stack(parts, what, options.root, options.ready_file, report)
        return asyncio.run(_serve(stack, options))


def report(line: str) -> None:
    with suppress(OSError):  # stderr is closed; the services go on all the same.
        print(f"slatemq: {line}", file=sys.stderr, flush=True)  # noqa: T201


async def _serve(stack: Stack, options: StackOptions) -> int:
    asked, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def received() -> None:
        if not asked.is_set():
            report("stopping; a second signal ends the calls in flight at once")
        (hurry if asked.is_set() else asked).set()

    for number in _END_SIGNALS:
        loop.add_signal_handler(number, received)
    try:
        code = await _until_end(stack, options, asked)
    finally:
        clean = await stack.stop(hurry)
        if asked.is_set():
            how = "all has stopped" if clean else "all has ended, not all of it by itself"
            report(f"{how}; data in {options.root}{_logs(options)}")
    return code if clean or code != EXIT_CLEAN else EXIT_FAILED


async def _until_end(stack: Stack, options: StackOptions, asked: asyncio.Event) -> int:
    """Start, print how to use it, and wait for what ends it."""
    signalled = asyncio.create_task(asked.wait())
    try:
        starting = asyncio.create_task(stack.start())
        if await _cut_short(starting, signalled):
            return EXIT_CLEAN
        try:
            starting.result()
        except StartFailed as failure:
            report(f"{failure}{_logs(options)}")
            return failure.code
        _say_ready(stack, options)
        replaced = asyncio.create_task(stack.wait_without_owners())
        if await _cut_short(replaced, signalled):
            return EXIT_CLEAN
        replaced.result()
        report("no service that owns data is left: stopping")
        return EXIT_FENCED if stack.replaced else EXIT_FAILED
    finally:
        signalled.cancel()


async def _cut_short(work: asyncio.Task[None], signalled: asyncio.Task[Any]) -> bool:
    """Wait for the work; returns whether a signal has ended it before its time."""
    await asyncio.wait([work, signalled], return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        return False
    work.cancel()
    await asyncio.wait([work])
    return True


def _say_ready(stack: Stack, options: StackOptions) -> None:
    """Two lines on stdout, the last of the start; where everything is goes to stderr."""
    where = ", ".join(f"{name} {address}" for name, address in stack.endpoints.items())
    report(f"{where}; data in {options.root}{_logs(options)}")
    endpoint = next(iter(stack.endpoints.values()))
    command, at = _command(), "" if endpoint == DEFAULT_ENDPOINT else f" --endpoint {endpoint}"
    with suppress(OSError):
        print(  # noqa: T201
            f"SlateMQ is ready at {endpoint}; publish a first message:"
            f" {command} queue create hello{at}; {command} publish --to hello{at} Hello"
            f"\nThe console is at {stack.pages['console']}",
            flush=True,
        )


def _command() -> str:
    """The command `slatemq` beside this Python, as a shell in this folder finds it."""
    command = Path(sys.executable).with_name("slatemq")
    if shutil.which("slatemq") == str(command):
        return "slatemq"
    folder = Path.cwd()
    return str(command.relative_to(folder) if command.is_relative_to(folder) else command)


def _logs(options: StackOptions) -> str:
    return f"; logs in {options.logs}" if options.logs is not None else ""


def _prepare_folders(options: StackOptions) -> None:
    """Make the folders; raises OSError where one cannot be written."""
    for folder in {options.data, options.logs} - {None}:
        assert folder is not None
        folder.mkdir(parents=True, exist_ok=True)
        _try_writing(folder)
    if options.ready_file is not None:
        _try_writing(options.ready_file.resolve().parent)


def _try_writing(folder: Path) -> None:
    probe = folder / f".write-probe-{os.getpid()}"
    probe.touch()
    probe.unlink()


def _other_launcher(data: Path | None, held: ExitStack) -> str:
    """The process that runs a stack on the folder; empty: this one does, while it is `held`."""
    if data is None:
        return ""
    # Without a buffer: where the disk is full, closing the file would fail once more.
    lock = held.enter_context((data / LOCK_NAME).open("a+b", buffering=0))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        return lock.read().decode().strip() or "unknown"
    lock.truncate(0)
    lock.write(str(os.getpid()).encode())
    return ""


def _take_over(data: Path, other: str, held: ExitStack) -> str:
    """The process that has taken the folder meanwhile; empty: this one has, while it is `held`."""
    folder = os.open(data, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # Of several at once only the first finds `other` there.
        found = _other_launcher(data, held)
        if found != other:
            return found
        # The other one's file stays locked until it has ended.
        (data / LOCK_NAME).unlink(missing_ok=True)
        taker = _other_launcher(data, held)
    finally:
        os.close(folder)
    if not taker:
        report(
            f"warning: another stack (process {other}) runs on {data}; it loses that data to this "
            "one: its services will be fenced and stop"
        )
    return taker
