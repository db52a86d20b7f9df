"""`python -m services.ingest`: one ingest shard."""

from __future__ import annotations

from libs.serving.main import main
from services.ingest.config import IngestConfig
from services.ingest.service import IngestProcess

if __name__ == "__main__":
    main("ingest", IngestConfig, IngestProcess)
