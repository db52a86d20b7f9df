"""Runs a module as a program, and records when each of our functions is called.

`python -m tests.integration.stack.recorded_calls FILE MODULE [ARGUMENT…]`: FILE gets the calls as
JSON when the program exits.
"""

from __future__ import annotations

import atexit
import json
import runpy
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType

REPOSITORY = Path(__file__).resolve().parents[3]
OURS = ("slatemq", "libs", "services")

Call = tuple[float, str]
"""When, by the monotonic clock of the machine, and `file:function`."""


class CallRecorder:
    """Records the calls of our functions in all threads that start after it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._names: dict[CodeType, str] = {}

    def start(self) -> None:
        threading.setprofile(self._record)
        sys.setprofile(self._record)

    def stop(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _record(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        name = self._names.get(code)
        if name is None:
            name = self._names[code] = _name_of(code)
        if name:
            self.calls.append((time.monotonic(), name))


def _name_of(code: CodeType) -> str:
    """`file:function`, or "" for code that is not ours."""
    file = Path(code.co_filename)
    if not file.is_relative_to(REPOSITORY):
        return ""
    file = file.relative_to(REPOSITORY)
    return f"{file}:{code.co_qualname}" if file.parts[0] in OURS else ""


def main(out: str, module: str, *arguments: str) -> None:
    recorder = CallRecorder()
    atexit.register(lambda: Path(out).write_text(json.dumps(recorder.calls)))
    sys.argv = [module, *arguments]
    recorder.start()
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
