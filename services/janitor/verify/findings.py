"""What a verification found: each finding names its record, what is wrong, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

ALIKE_MAX: Final = 20
"""Findings of one kind about one kind of record of a database; the others are only counted."""


LEFTOVERS_MAX: Final = 100_000
"""Leftovers of one kind and database that a repair gets: some 50 MB. The next one gets others."""


class Kind(StrEnum):
    """What a finding is about, and how bad that is."""

    FILE = "file"
    ROW = "row"
    COUNT = "count"
    ORDER = "order"
    MESSAGE = "message"
    PAYLOAD = "payload"
    OBJECT = "object"
    REFERENCE = "reference"
    LEFTOVER = "leftover"


ADVICE: Final = {
    Kind.FILE: "restore this file from the store's versions or a copy, then verify again; until "
    "then what it holds is lost, and its owner may not start",
    Kind.ROW: "keep a copy of the database, then restore it from one that verifies; what needs "
    "this row is not served",
    Kind.COUNT: "report it with this line: counts and lists are written in one commit. Purge the "
    "queue's list, or create the queue again, to begin from a right count",
    Kind.ORDER: "report it with this line: orders are assigned by one owner and never repeat",
    Kind.MESSAGE: "restore the ingest's database from a copy that has the message; else each queue "
    "makes it a dead letter (`payload gone`) when it is claimed",
    Kind.PAYLOAD: "restore the ingest's database from a copy that has the payload; else each queue "
    "makes the message a dead letter (`payload damaged`) when it is claimed",
    Kind.OBJECT: "restore this object from the store's versions or a copy; else each queue makes "
    "its message a dead letter (`payload gone` or `payload damaged`) when it is claimed",
    Kind.REFERENCE: "report it with this line: both sides are written in one commit, or in an "
    "order that a crash does not break",
    Kind.LEFTOVER: "nothing needs it: `slatemq repair` removes it",
}
"""What to do about a kind of finding."""


@dataclass(frozen=True, order=True)
class Finding:
    """One thing that is wrong, or left over.

    Attributes:
        shard: The database, such as `broker/3`, or the folder of an object.
        record: What kind of record, file or object.
        key: The key in words, or the path.
        wrong: What is wrong.
        message_ids: The messages that cannot be delivered because of it, some of them.
        queue_id: The queue that it is about, if any.
    """

    kind: Kind
    shard: str
    record: str
    key: str
    wrong: str
    advice: str = ""
    queue_id: str = ""
    message_ids: tuple[int, ...] = ()

    @property
    def is_fault(self) -> bool:
        """Whether something is wrong; a leftover only takes space."""
        return self.kind is not Kind.LEFTOVER

    @property
    def what_to_do(self) -> str:
        return self.advice or ADVICE[self.kind]

    def __str__(self) -> str:
        return f"{self.shard}: {self.record} {self.key}: {self.wrong}"


@dataclass
class Findings:
    """Collects findings, and counts what was read.

    Attributes:
        counts: How much was read, by what it is.
        unreadable: Shards of which some part could not be read, so what is missing there may exist.
        leftovers: What only takes space, LEFTOVERS_MAX that are alike at most.
    """

    counts: Counter[str] = field(default_factory=Counter)
    unreadable: set[str] = field(default_factory=set)
    leftovers: list[Finding] = field(default_factory=list)
    _found: list[Finding] = field(default_factory=list)
    _counts: Counter[tuple[Kind, str, str]] = field(default_factory=Counter)

    def add(
        self,
        kind: Kind,
        shard: str,
        record: str,
        key: str,
        wrong: str,
        *,
        advice: str = "",
        queue_id: str = "",
        message_ids: Sequence[int] = (),
    ) -> None:
        """Note a finding; beyond ALIKE_MAX that are alike it is not among `all`, only counted."""
        self._counts[kind, shard, record] += 1
        count = self._counts[kind, shard, record]
        found = Finding(kind, shard, record, key, wrong, advice, queue_id, tuple(message_ids))
        if count <= ALIKE_MAX:
            self._found.append(found)
        if not found.is_fault and count <= LEFTOVERS_MAX:
            self.leftovers.append(found)

    def all(self) -> list[Finding]:
        """The findings, faults first; those beyond ALIKE_MAX are one finding for each kind."""
        more = [
            Finding(kind, shard, record, "", f"{count - ALIKE_MAX:,} more that are alike")
            for (kind, shard, record), count in self._counts.items()
            if count > ALIKE_MAX
        ]
        return sorted([*self._found, *more], key=lambda one: (not one.is_fault, one))

    @property
    def faults_count(self) -> int:
        return sum(n for (kind, _, _), n in self._counts.items() if kind is not Kind.LEFTOVER)

    @property
    def leftovers_count(self) -> int:
        return sum(n for (kind, _, _), n in self._counts.items() if kind is Kind.LEFTOVER)
