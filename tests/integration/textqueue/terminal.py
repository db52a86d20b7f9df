"""`slatemq tq` on one file, in the tests' own process."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest

from slatemq.cli.app import invoke

CONTENT = """\
# what is to be done
-photo 7\tin two
 lines
\\retries=03
\\error=       \n\
=photo 6
!photo 5
\\error=gone
-photo 8
>later kind
"""


class Terminal:
    """Runs commands in this process on one file."""

    def __init__(self, capture: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self._capture = capture
        self._patch = patch
        self.err = ""

    def __call__(self, *words: str, stdin: bytes = b"", code: int = 0) -> str:
        self._patch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(stdin))))
        ended = invoke(["tq", *words])
        out, self.err = self._capture.readouterr()
        assert ended == code, self.err
        return out

    def objects(self, *words: str, stdin: bytes = b"", code: int = 0) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self(*words, stdin=stdin, code=code).splitlines()]
