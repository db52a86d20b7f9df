"""Who did what: the acts that change more than messages.

Never payloads, tokens or headers of messages: an act has names, places, results, and the filters
that it was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from slatemq._secrets import redacted

AUDITED: Final = frozenset({"edit", "administer", "operate", "service"})
"""What these acts ask of their caller: a verb, or to be a service."""

REFUSALS: Final = frozenset({"PERMISSION_DENIED", "UNAUTHENTICATED"})
"""The outcomes of acts that the caller may not do."""

SUBJECTS_MAX: Final = 20
"""Queues that an act names, and details: a request can have thousands."""

READ_MAX: Final = 1_000
"""Of them that are read: many may be the same one."""

NAME_CHARACTERS_MAX: Final = 255
"""Of each of them: that in a refused request is of any length."""

REDACTED_MAX: Final = 1_024
"""Characters of each in which secrets are looked for: no login or token is nearly as long."""


@dataclass(frozen=True, slots=True)
class Act:
    """One act of a caller.

    Attributes:
        principal: Who called; empty: who called was not proven.
        proof: How that was proven, as of a principal; `user` by the machine; `file` of `read-file`.
        act: The method, as in `/slatemq.v1.QueueService/PurgeQueue`; of other acts a word.
        subjects: The queues that the request named, at most SUBJECTS_MAX.
        details: What else of the request its proto has audited, as `run_id=ab12`.
        peer: Where the call came from, as gRPC has it: `ipv4:127.0.0.1:50000`.
        outcome: `OK`, or the code of the error; of a command, FAILED.
        request_id: The caller's trace ID; empty where it has none.
        held_back: How many refusals of the same call to this principal, or to callers whose proof
            is not good, were not recorded before it.
    """

    principal: str
    proof: str
    act: str
    subjects: tuple[str, ...]
    details: tuple[str, ...]
    peer: str
    outcome: str
    request_id: str
    held_back: int = 0


def subjects_of(texts: Iterable[str]) -> tuple[str, ...]:
    """The first of these queues or details, each once, without secrets and not too long."""
    distinct: dict[str, None] = {}
    for text in islice(texts, READ_MAX):
        distinct[text[:REDACTED_MAX]] = None
        if len(distinct) == SUBJECTS_MAX:
            break
    # A secret that is cut is not known for one.
    return tuple(dict.fromkeys(redacted(text)[:NAME_CHARACTERS_MAX] for text in distinct))
