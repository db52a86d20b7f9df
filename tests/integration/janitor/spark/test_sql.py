"""`python -m services.janitor sql`, as a process of its own on a machine without Java."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from services.janitor.spark.sql import parse
from slatemq.v1 import ingest_pb2
from tests.forms import proof
from tests.integration.broker.rig import running
from tests.integration.ingest.server import ROOT, serving
from tests.integration.janitor.spark.test_temporary_folder import without_execution


def without_java(folder: Path) -> dict[str, str]:
    """An environment with all programs of the machine but java."""
    folder.mkdir()
    for place in ("/usr/bin", "/bin"):
        for program in Path(place).iterdir():
            link = folder / program.name
            if program.name != "java" and not link.is_symlink():
                link.symlink_to(program)
    kept = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    return {**kept, "PATH": str(folder), "PYTHONPATH": str(ROOT), "TZ": "Asia/Tokyo"}


@pytest.mark.slow  # starts Spark for each question
@pytest.mark.parametrize("asked_wrongly", [False, proof(True)])
async def test_questions_are_answered_on_stdout_on_a_machine_without_java(
    tmp_path: Path, asked_wrongly: bool
) -> None:
    """Temporary files are in a folder that allows no execution, where one can be had.

    The short form asks nothing wrong: tests/unit/janitor/test_failures.py has the texts.
    """
    data, environ = tmp_path / "data", without_java(tmp_path / "bin")
    (folder := tmp_path / "tmp").mkdir()
    prefix, more = without_execution(folder)

    async def sql(*arguments: str) -> tuple[int, str, str]:
        started = await asyncio.create_subprocess_exec(
            *(*prefix, sys.executable, "-m", "services.janitor", "sql", "--root", data.as_uri()),
            *("--master", "local[1]", "--memory", "512m", *arguments),
            cwd=ROOT,
            env={**environ, **more},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await started.communicate()
        assert started.returncode is not None
        return started.returncode, out.decode(), err.decode()

    async with serving(data.as_uri()) as ingest, running(data) as rig:
        await rig.create("orders")
        headers = {"type": "order"}
        await ingest.publish(
            ingest_pb2.PublishRun(payloads=[b"1", b"2"], headers=headers, created_at_ms=1 << 62)
        )

        answered = await sql(
            "SELECT headers, count(*) AS count, (SELECT max(queue) FROM queues) AS queue, "
            "TIMESTAMP'2026-07-01 12:00:00' AS at, max(created_at) AS last FROM messages "
            "GROUP BY headers",
            *("--format", "json"),
        )
        if asked_wrongly:
            code, out, err = await sql("SELECT nothing FROM queues")
            assert (code, out) == (1, "")
            assert "`nothing` cannot be resolved" in err
            assert "at org.apache" not in err
            code, out, err = await sql("SELECT 1", "--master", "nowhere")
            assert (code, out) == (1, "")
            assert err.splitlines()[-1].startswith("Spark does not start on nowhere: ")

    code, out, err = answered
    assert code == 0, err
    assert json.loads(out) == {
        "headers": {"type": "order"},
        "count": 2,
        "queue": "orders",
        "at": "2026-07-01T12:00:00.000Z",
        "last": "9999-12-31T23:59:59.999Z",
    }


def test_the_root_is_taken_from_the_environment_and_missed_where_it_is_nowhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    question = parse(["sql", "SELECT 1"], {"SLATEMQ_ROOT": "file:///data"})
    assert (question.sql, question.root, question.form) == ("SELECT 1", "file:///data", "table")

    with pytest.raises(SystemExit) as ended:
        parse(["sql", "SELECT 1"], {})
    assert ended.value.code == 2
    assert "--root or SLATEMQ_ROOT is required" in capsys.readouterr().err


def test_the_help_has_the_tables_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["sql", "--help"], {})

    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "tables: messages, payloads, queues" in out
    assert "python -m services.janitor sql --root file:///var/lib/slatemq" in out
    assert "1,000 rows" in out
