"""What the pages on queue files show happens as it stands there: commands, programs, files."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)

NEEDS_A_SERVER = re.compile(r"\bslatemq (?!tq\b)")

SHELL = f'slatemq() {{ {sys.executable} -m slatemq.cli "$@"; }}\nset -eu -o pipefail\n'

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


def run(arguments: list[str], folder: Path) -> str:
    ended = subprocess.run(
        arguments,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@needs_bash
@pytest.mark.slow  # starts a process for each block
@pytest.mark.parametrize("name", ["docs/how-to/textqueue.md", "docs/reference/textqueue.md"])
def test_what_the_page_shows_happens(name: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / name).read_text(encoding="utf-8"))
    first = True

    for language, block in blocks:
        if language == "python":
            run([sys.executable, "-c", block], tmp_path)
        elif language == "sh":
            assert run(["bash", "-c", SHELL + block], tmp_path)
        elif language == "console":
            commands = "\n".join(line[2:] for line in block.splitlines() if line.startswith("$ "))
            if NEEDS_A_SERVER.search(commands):
                continue  # tests/integration/cli has these
            printed = [line for line in block.splitlines() if not line.startswith("$ ")]
            assert run(["bash", "-c", SHELL + commands], tmp_path).splitlines() == printed
        elif language == "tq" and not first and "\n\\handle=" not in block:
            # A file that is shown after a program is what one of its files has come to be; handles
            # are in those that a server's messages were exported to
            assert block in {path.read_text() for path in tmp_path.glob("*.tq")}
        first = False
    assert {language for language, _ in blocks} & {"python", "console"}
