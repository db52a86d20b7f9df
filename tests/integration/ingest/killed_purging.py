"""A process for tests: an ingest that is killed when it is about to delete an object.

Its arguments are those of `python -m services.ingest`.
"""

from __future__ import annotations

import os
import signal

from libs.serving.main import main
from libs.storage.database.blobs import Blobs
from services.ingest.config import IngestConfig
from services.ingest.service import IngestProcess


async def _killed(self: Blobs, uri: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    Blobs.delete = _killed  # type: ignore[method-assign]
    main("ingest", IngestConfig, IngestProcess)
