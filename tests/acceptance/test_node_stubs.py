"""The page for Node.js runs as it stands there: the protos, two packages, and nothing of ours."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.acceptance.local_stack import REPOSITORY, LocalStack

pytestmark = pytest.mark.stack

BLOCK = re.compile(r"^```js\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGE = REPOSITORY / "docs/how-to/stubs-nodejs.md"
PACKAGES = ("@grpc/grpc-js", "@grpc/proto-loader")
CACHE = REPOSITORY / ".venv" / "node"
"""Kept between runs, beside what the other tests need; `make clean` removes it."""


def modules() -> Path:
    """The folder that has the packages, from the registry that npm is set to."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("node and npm are not here: the page for Node.js was not run")
    found = CACHE / "node_modules"
    if not all((found / package / "package.json").exists() for package in PACKAGES):
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [npm, "install", "--prefix", str(CACHE), "--no-audit", "--no-fund", *PACKAGES]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        if ended.returncode != 0:
            pytest.skip(f"npm has no packages here, the page was not run: {ended.stderr[-300:]}")
    return found


def test_the_program_on_the_page_for_nodejs_runs(stack: LocalStack, tmp_path: Path) -> None:
    # Given the blocks of the page as one program
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    program = tmp_path / "page.js"
    program.write_text("\n".join(blocks).replace("127.0.0.1:7420", stack.endpoint))

    # When it runs beside the protos
    ended = subprocess.run(
        ["node", str(program)],
        cwd=REPOSITORY,
        env={**os.environ, "NODE_PATH": str(modules())},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    # Then messages went there and back, and an error has details
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout
    assert len(re.findall(r"^received ", said, re.MULTILINE)) == 3, said
    assert "received päivää" in said
    assert "refused INVALID_FIELD [" in said
    assert "field: 'runs'" in said
