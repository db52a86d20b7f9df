"""The journal of an import, beside the queue file: continuing after a kill does nothing twice.

`F.tq.importing` exists from the first batch to the end of the import::

    {"target": …, "states": […], "secret": …, "through": 4711, "last": 4600, "digest": …,
     "sending": {"offsets": […], "request_id": …, "at_ms": …}}

`sending` is a batch that may or may not have arrived: it is stored before it is sent, and repeated
under its request ID, which the server remembers for 10 minutes.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from uuid import uuid4

from slatemq.cli.failures import BadInput

REPEATABLE_MS = 9 * 60 * 1000
"""How long a batch can be repeated: request IDs and dedupe keys are remembered for at least 10
minutes."""


@dataclass(frozen=True, slots=True)
class Sending:
    """A batch being sent: the messages at these offsets."""

    offsets: list[int]
    request_id: str
    at_ms: int


@dataclass(slots=True)
class Journal:
    """The progress of an import.

    Attributes:
        path: Of the journal.
        target: `--to QUEUE` or `--publish`.
        states: Of the entries that it imports.
        secret: Part of all its request IDs and dedupe keys.
        through: The offset in the file where it continues.
        last: The offset of the last imported entry, -1 for none.
        digest: Of that entry's text.
        sending: A batch that may have been imported.
    """

    path: Path
    target: str
    states: list[str]
    secret: str = field(default_factory=lambda: uuid4().hex)
    through: int = 0
    last: int = -1
    digest: str = ""
    sending: Sending | None = None

    @classmethod
    def beside(cls, file: str, target: str, states: list[str]) -> Journal:
        """The journal that an earlier import left beside a file, or a new one. Raises BadInput."""
        path = Path(f"{file}.importing")
        try:
            left = json.loads(path.read_bytes())
            sending = left.pop("sending")
            found = cls(path, **left, sending=Sending(**sending) if sending else None)
        except FileNotFoundError:
            return cls(path, target, states)
        except (ValueError, TypeError, AttributeError, KeyError):
            raise BadInput(f"{path} cannot be read: check it, and remove it") from None
        if (found.target, found.states) != (target, states):
            raise BadInput(
                f"an import of {file} {found.target} ({', '.join(found.states)}) is not complete: "
                f"run that again first, or remove {path} to abandon it"
            )
        return found

    def store(self) -> None:
        fields = asdict(self)
        del fields["path"]
        beside = self.path.with_name(self.path.name + ".new")
        with beside.open("wb") as stream:
            stream.write(json.dumps(fields).encode())
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(self.path)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
