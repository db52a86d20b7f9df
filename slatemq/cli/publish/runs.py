"""The request IDs of a `publish --jsonl`: continuing after a failure stores nothing twice.

A batch's request ID is made of the run's secret, the place of the batch and its content, and
chooses the ingest shard. The secret is new for each run, or publishing a file again on purpose
would publish nothing; but a run that did not complete leaves it in a small file, which the next
run of the same source and options continues from:

    $XDG_STATE_HOME/slatemq/publish/<digest of source and options>.json   {"secret": …, "shards": …}

The server remembers request IDs for 10 minutes. The file is locked while its run is active: a
second run beside it has a secret of its own. An import from stdin uses the secret, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from slatemq.cli.publish.lines import Batch

if sys.platform != "win32":
    import fcntl

STATE_VARIABLE = "XDG_STATE_HOME"

FORGOTTEN_SECONDS = 86_400.0
"""Files older than this are removed: no instance remembers request IDs for longer."""


class Run:
    """One run, perhaps the continuation of one that failed.

    Attributes:
        secret: Part of all its request IDs.
        shards: The ingest shards that its batches go to.
    """

    def __init__(self, source: str, options: object, shards: Sequence[int]) -> None:
        self.secret = str(uuid4())
        self.shards = list(shards)
        key = hashlib.sha256(json.dumps([source, options]).encode()).hexdigest()[:32]
        self._path = state_folder("publish") / f"{key}.json"
        self._file: BinaryIO | None = None
        self._is_continued = False
        with suppress(OSError):
            self._open()

    @property
    def kept(self) -> bool:
        return self._file is not None

    def request_id(self, batch: Batch) -> str:
        """Unique to this batch of this run."""
        digest = hashlib.blake2b(f"{self.secret} {batch.first}".encode(), digest_size=16)
        for message in batch.messages:
            headers = json.dumps(sorted(message.headers.items())).encode()
            digest.update(b"%d %d " % (len(headers), len(message.payload)))
            digest.update(headers)
            digest.update(message.payload)
        return digest.hexdigest()

    def shard(self, request_id: str) -> int:
        """The batch's shard, always the same: only that shard remembers its request ID."""
        return self.shards[int(request_id[:8], 16) % len(self.shards)]

    def finish(self) -> None:
        """All lines are durable: the next run of this source is a new one."""
        if self._file is not None:
            with suppress(OSError):
                self._path.unlink()
        self.close()

    def stop(self, in_doubt: bool) -> bool:
        """End an incomplete run; return whether the next run continues this one.

        It need not where the outcome of every batch is known, here and in the runs before.
        """
        if not in_doubt and not self._is_continued:
            self.finish()
            return False
        self.close()
        return True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        if sys.platform == "win32":
            return
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _sweep(self._path.parent)
        file = self._path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._take_up(file)
        except OSError:
            file.close()
            raise
        self._file = file

    def _take_up(self, file: BinaryIO) -> None:
        file.seek(0)
        with suppress(ValueError, KeyError, TypeError):
            left = json.loads(file.read())
            secret, shards = str(left["secret"]), [int(shard) for shard in left["shards"]]
            if set(shards) <= set(self.shards) and shards:
                self.secret, self.shards = secret, shards
                self._is_continued = True
        file.seek(0)
        file.truncate()
        file.write(json.dumps({"secret": self.secret, "shards": self.shards}).encode())
        file.flush()


def state_folder(name: str) -> Path:
    """Where commands keep what outlasts them."""
    state = os.environ.get(STATE_VARIABLE)
    home = Path(state) if state else Path(os.path.expanduser("~")) / ".local" / "state"
    return home / "slatemq" / name


def _sweep(folder: Path) -> None:
    for path in folder.glob("*.json"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > FORGOTTEN_SECONDS:
                path.unlink()
