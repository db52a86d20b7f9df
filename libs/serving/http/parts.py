"""What a service adds to its HTTP port; light, since every service imports it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from libs.events.watch import QueueHealth


@dataclass(frozen=True)
class HttpReply:
    """A JSON response."""

    status: int
    body: Mapping[str, object]
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HttpPost:
    """A path that takes POST requests.

    Attributes:
        path: Of the URL, as in `/s3-events`.
        body_bytes_max: Largest body; a larger one is refused with 413 before it is read.
        answer: Gets the headers, by names in lower case, and the body; may raise SlateMQError.
        check: Gets the headers before the body is read; what it returns is the answer.
    """

    path: str
    body_bytes_max: int
    answer: Callable[[bytes], Awaitable[HttpReply]]
    check: Callable[[Mapping[str, str]], HttpReply | None]


@dataclass(frozen=True)
class HttpParts:
    """What a service adds beside `/health` and `/metrics`.

    Attributes:
        posts: Paths of its own.
        queue_health: Asks the queue backend; None in direct mode.
    """

    posts: Sequence[HttpPost] = ()
    queue_health: Callable[[], Awaitable[QueueHealth]] | None = None
