"""The examples of the client's page run, one after another, against a real stack."""

import ast
import re
from pathlib import Path
from types import CodeType, FunctionType

import pytest

from tests.acceptance.local_stack import REPOSITORY, LocalStack

pytestmark = pytest.mark.stack

PAGE = REPOSITORY / "docs" / "reference" / "client.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def programs(endpoint: str) -> list[CodeType]:
    text = PAGE.read_text(encoding="utf-8")
    made = []
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start(1))
        source = "\n" * line + found[1].replace("127.0.0.1:7420", endpoint)
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        made.append(compile(source, str(PAGE), "exec", flags=flags, dont_inherit=True))
    return made


async def test_every_example_of_the_page_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {"__name__": "page"}
    with LocalStack(tmp_path, ready=True) as stack:
        for program in programs(stack.endpoint):
            work = FunctionType(program, names)()
            if work is not None:
                await work

    out = capsys.readouterr().out
    for expected in (
        "b'greeting 9'",
        "True True",
        "no such lease",
        "delayed b'call home'",
        "b'call home, now'",
        "done 1 of 1",
        "{'n': 1} 0",
        "['urgent']",
        "True 7",
        "QUEUE_NOT_FOUND absent",
        "message.headers",
        "ingest 127.0.0.1:",
    ):
        assert expected in out
