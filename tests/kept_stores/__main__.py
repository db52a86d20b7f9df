"""`python -m tests.kept_stores NAME`: keep a store made by the code of this checkout."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

import slatemq
from tests.acceptance.local_stack import LocalStack
from tests.kept_stores import FOLDER, Contents, fill, pack


async def _fill(endpoint: str) -> Contents:
    async with slatemq.connect(endpoint) as client:
        return await fill(client)


def main() -> None:
    name = sys.argv[1]
    with tempfile.TemporaryDirectory(prefix="slatemq-kept-") as text:
        folder = Path(text)
        with LocalStack(folder, ready=True) as stack:
            contents = asyncio.run(_fill(stack.endpoint))
            # While it runs, with its WAL: so does a killed process leave it.
            shutil.copytree(folder / "data", folder / "copy")
        pack(name, folder / "copy", contents)
    sizes = {path.name: path.stat().st_size for path in FOLDER.glob(f"{name}.*")}
    sys.stdout.write(f"{sizes}\n")


if __name__ == "__main__":
    main()
