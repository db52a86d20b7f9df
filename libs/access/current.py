"""The caller of the call that a task serves, and what it may do."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING

from libs.access.verbs import Verb

if TYPE_CHECKING:
    from libs.access.callers import Caller

__all__ = ["ALL_QUEUES", "current_caller", "may", "require", "require_publish"]

current_caller: ContextVar[Caller | None] = ContextVar("current_caller", default=None)
"""None where there is no policy, and for calls of services: then everything is permitted."""

ALL_QUEUES = ""
"""In place of a queue: only a rule for `*` covers it."""


def may(verb: Verb, queue: str) -> bool:
    """Whether the caller may do this on a queue, for those that a listing leaves out."""
    caller = current_caller.get()
    return caller is None or caller.rights.decide(verb, queue).is_permitted


def require(verb: Verb, queue: str) -> None:
    """Raises PermissionDenied unless the caller may do this on a queue."""
    caller = current_caller.get()
    if caller is not None:
        caller.require(verb, queue)


def require_publish(queue: str, headers: Mapping[str, str]) -> None:
    """Raises PermissionDenied unless the caller may publish such a message to a queue."""
    caller = current_caller.get()
    if caller is not None:
        caller.publish([({**headers, "queue": queue}, 1, 0)])
