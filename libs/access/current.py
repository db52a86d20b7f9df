"""The caller of the call that a task serves, and what it may do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from math import inf
from typing import TYPE_CHECKING

from libs.access.principals import BOUND_REASONS
from libs.access.verbs import Verb
from slatemq.errors import (
    WRONG_SHARD,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    SlateMQError,
)

if TYPE_CHECKING:
    from libs.access.callers import Caller
    from libs.access.quotas import PrincipalQuota, Quantity

current_caller: ContextVar[Caller | None] = ContextVar("current_caller", default=None)
"""None where there is no policy, and for calls of services: then everything is permitted."""

REFUSED_PUBLISHES = "refused_publishes"
"""Why the answers of refused publishes are held back, apart from those that limits refuse."""

ALL_QUEUES = ""
"""In place of a queue: only a rule for `*` covers it."""


def may(verb: Verb, queue: str) -> bool:
    """Whether the caller may do this on a queue, for those that a listing leaves out."""
    caller = current_caller.get()
    return caller is None or caller.rights.permits(verb, queue)


def may_some(verbs: Iterable[Verb], queue: str) -> bool:
    """Whether the caller may do one of these on a queue."""
    return any(may(verb, queue) for verb in verbs)


def headers_size(headers: Mapping[str, str]) -> int:
    """The bytes of headers, as limits count them."""
    return sum(_size(key) + _size(value) for key, value in headers.items())


def _size(text: str) -> int:
    # Most are ASCII, which a text knows of itself.
    return len(text) if text.isascii() else len(text.encode())


def require(verb: Verb, queue: str) -> None:
    """Raises PermissionDenied unless the caller may do this on a queue."""
    caller = current_caller.get()
    if caller is not None:
        caller.require(verb, queue)


def require_some(verbs: Sequence[Verb], queue: str) -> None:
    """Raises PermissionDenied, naming all of these, unless the caller may do one on a queue."""
    caller = current_caller.get()
    if caller is None or may_some(verbs, queue):
        return
    *some, last = verbs
    raise PermissionDenied(
        f"no rule permits {caller.principal.name!r} to {', '.join(some)} or {last} {queue!r}",
        metadata={"queue": queue},
    )


async def require_pushes(
    messages: Iterable[tuple[int, str, Mapping[str, str], int]], item: str
) -> None:
    """Admit messages that go to a queue, whatever their header `queue` says.

    Of each come its place in the request, its queue, headers and the bytes of its payload. Raises
    as `Caller.publish`.
    """
    caller = current_caller.get()
    if caller is not None:
        runs = (
            (at, {**headers, "queue": to}, 1, size + headers_size(headers))
            for at, to, headers, size in messages
        )
        await caller.publish(runs, item)


def require_edit(headers: Mapping[str, str] | None, payload_bytes: int) -> None:
    """Admit new content of a message, as a publish of it; headers of None stay as they are.

    Raises as `Caller.publish`.
    """
    caller = current_caller.get()
    if caller is not None:
        if headers is not None:
            caller.require_publish(headers)
        caller.quota.publish(1, payload_bytes + headers_size(headers or {}))


def require_publish_any(queue: str) -> None:
    """Raises PermissionDenied unless the caller may publish to a queue, whatever the headers."""
    caller = current_caller.get()
    if caller is not None and not caller.rights.permits_any_message(queue):
        raise PermissionDenied(
            f"no rule without a condition permits {caller.principal.name!r} to publish to "
            f"{queue!r}, which moving messages there needs",
            metadata={"verb": "publish", "queue": queue},
        )


def caller_name() -> str:
    """The name of the calling principal; empty where there is no policy."""
    caller = current_caller.get()
    return "" if caller is None else caller.principal.name


def caller_quota() -> PrincipalQuota | None:
    """What the calling principal takes; None where there is no policy."""
    caller = current_caller.get()
    return None if caller is None else caller.quota


def hold_to(kind: Quantity, count: int, before_count: int = 0) -> None:
    """Raises ResourceExhausted where this grows beyond the caller's limit."""
    caller = current_caller.get()
    if caller is not None:
        caller.quota.hold(kind, count, before_count)


async def hold_back(
    error: SlateMQError, left_s: float | None = None, *, is_publish: bool = False
) -> None:
    """Delay the answer with this error where its caller is refused again and again.

    So it is by a limit, and publishes for whatever fault of their caller: until they are refused,
    they cost as much as others. `left_s` is the time until the deadline of the call: half of it at
    most is waited, so that the caller gets the answer. None: it has none.
    """
    caller = current_caller.get()
    if caller is None:
        return
    if isinstance(error, ResourceExhausted) and error.reason in BOUND_REASONS:
        cause = error.metadata["limit"]
    elif is_publish and _is_of_publisher(error):
        cause = REFUSED_PUBLISHES
    else:
        return
    await caller.quota.hold_back(cause, inf if left_s is None else left_s / 2)


def _is_of_publisher(error: SlateMQError) -> bool:
    # A refusal that names the shard of a dedupe key is how clients find it.
    return isinstance(error, PermissionDenied | InvalidArgument) and error.reason != WRONG_SHARD
