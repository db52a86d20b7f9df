"""This code for executors on other machines, which then need Python and the packages alone."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

__all__ = ["PACKAGES", "shipped_code"]

PACKAGES: Final = ("services", "libs", "slatemq")
"""What tasks import of ours."""

_ROOT: Final = Path(__file__).resolve().parents[3]


@contextmanager
def shipped_code(spark: SparkSession) -> Iterator[None]:
    """Executors import our packages as this process has them, whatever their machine has.

    Until the block ends: executors that come later get them, too. For before anything is
    registered: what is registered after that knows of them.
    """
    with tempfile.TemporaryDirectory(prefix="slatemq-code-") as folder:
        archive = Path(folder) / "slatemq_code.zip"
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            for package in PACKAGES:
                for path in sorted((_ROOT / package).rglob("*.py")):
                    file.write(path, path.relative_to(_ROOT))
        spark.sparkContext.addPyFile(str(archive))
        yield
