"""Commands that the tests of queue files and dead letters run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.acceptance.local_stack import wait_until
from tests.integration.cli.stack import Cli, Result


def new_queue(cli: Cli, **settings: Any) -> str:
    return cli.create(done_retention=3_600, **settings)


def counts(cli: Cli, queue: str) -> dict[str, int]:
    return {name.removesuffix("_count"): n for name, n in cli.counts(queue).items() if n}


def objects(cli: Cli, *arguments: str) -> list[Any]:
    return cli.ok(*arguments, "--json").objects


def contents(cli: Cli, queue: str) -> list[tuple[Any, dict[str, str]]]:
    """Payloads and headers of what is available, in order; claims it, and gives it back."""
    found = objects(cli, "claim", queue, "--max", "100", "--wait", "30s")
    cli.ok("nack", "--release", *(one["lease_token"] for one in found))
    return [(one.get("payload", one.get("payload_base64")), one["headers"]) for one in found]


def dead_letters(
    cli: Cli, queue: str, *payloads: bytes, headers: dict[str, str] | None = None
) -> None:
    before = counts(cli, queue).get("failed", 0)
    for payload in payloads:
        cli.client.publish(payload, {"queue": queue, **(headers or {})})
    wait_until(lambda: counts(cli, queue).get("available", 0) == len(payloads), 60)
    left_count = len(payloads)
    while left_count:
        claimed = cli.client.claim(queue, left_count, wait=60)
        assert claimed
        for one in claimed:
            one.nack("no such street")
        left_count -= len(claimed)
    wait_until(lambda: counts(cli, queue).get("failed", 0) == before + len(payloads), 60)


def edited(
    cli: Cli, queue: str, tmp_path: Path, script: str, *options: str, answer: bytes = b"y\n"
) -> Result:
    """`failed edit`, with an editor that runs this Python on the lines of the file."""
    editor = tmp_path / "editor.py"
    editor.write_text(
        "import sys\n"
        "path = sys.argv[1]\n"
        "text = open(path, encoding='utf-8', newline='').read()\n"
        f"{script}\n"
        "open(path, 'w', encoding='utf-8', newline='').write(text)\n"
    )
    environ = {"EDITOR": f"{sys.executable} {editor}", "VISUAL": ""}
    return cli.run("failed", "edit", queue, *options, stdin=answer, environ=environ)
