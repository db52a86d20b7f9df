"""Calling other processes: what counts as a failure of theirs, backoff, what is logged of it."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import grpc.aio

from libs.storage.errors import StorageError
from slatemq._rpc.rpc_status import from_rpc_error, raising_peer_moved
from slatemq.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, SlateMQError

log = logging.getLogger(__name__)

BACKOFF_MS_MIN = 20
BACKOFF_MS_MAX = 1_000
"""A process that restarts is back within a second or two; nothing is routed until we notice."""


UNSTORABLE_WAIT_S = 60.0
"""How long messages wait at most after a peer ended over them; see `unstorable_wait_s`."""


class PeerFailed(Exception):
    """A peer is down, refused a call, or returned nonsense. Start over with it."""


class PeerBusy(PeerFailed):
    """A peer is overloaded: the same call may succeed later."""


class PeerRefused(PeerFailed):
    """A peer says that the call itself is wrong, so what we assume of it is."""


class PeerLate(PeerFailed):
    """A peer did not answer in time: ask for less."""


class CallTooLarge(PeerFailed):
    """A call is larger than the peer, or gRPC, accepts: split it."""


class PeerUnstorable(PeerFailed):
    """A peer cannot write what a call leads to, and ended over it: repeat it seldom."""


@contextmanager
def peer_failures() -> Iterator[None]:
    """Turn every failure of a call by its peer into PeerFailed."""
    try:
        with raising_peer_moved():
            yield
    except grpc.RpcError as error:
        problem = from_rpc_error(error)
        kind = _KINDS.get(type(problem), PeerFailed)
        kind = _KINDS_BY_REASON.get(problem.reason, kind)
        raise kind(f"{problem.reason}: {problem.message}") from error
    except (grpc.aio.BaseError, SlateMQError, StorageError, OSError) as error:
        raise PeerFailed(f"{type(error).__name__}: {error}") from error


_KINDS: dict[type[SlateMQError], type[PeerFailed]] = {
    InvalidArgument: PeerRefused,
    ResourceExhausted: PeerBusy,
    DeadlineExceeded: PeerLate,
}

_KINDS_BY_REASON: dict[str, type[PeerFailed]] = {
    "MESSAGE_TOO_LARGE": CallTooLarge,
    "UNSTORABLE_RECORD": PeerUnstorable,
}


def unstorable_wait_s() -> float:
    """How long messages wait after PeerUnstorable: half of the longest wait at least.

    Each time another one, so that those that only had the same commit get past the others.
    """
    return random.uniform(0.5, 1.0) * UNSTORABLE_WAIT_S


class Backoff:
    """Waits that double from 20 ms to a longest, each shortened at random to spread callers."""

    def __init__(self, ms_max: int = BACKOFF_MS_MAX) -> None:
        self._ms_max = ms_max
        self._next_ms = BACKOFF_MS_MIN

    def reset(self) -> None:
        self._next_ms = BACKOFF_MS_MIN

    def next_seconds(self) -> float:
        wait_ms = self._next_ms
        self._next_ms = min(2 * wait_ms, self._ms_max)
        return random.uniform(0.5, 1.0) * wait_ms / 1000


class PeerHealth:
    """Whether a peer is up, with a log line for each change and none for each attempt."""

    def __init__(self, peer: str, doubt: Callable[[], None] | None = None) -> None:
        """`peer` is such as `broker 3`; `doubt` its address when a call fails."""
        self._peer = peer
        self._doubt = doubt
        self._is_up: bool | None = None

    @property
    def is_up(self) -> bool:
        """Whether the last call succeeded; False before the first."""
        return self._is_up is True

    def mark_up(self) -> None:
        if self._is_up is not True:
            log.info("%s is up", self._peer)
        self._is_up = True

    def mark_down(self, failure: Exception) -> None:
        """A call failed; the caller tries again, where the topology has the peer by then."""
        if self._doubt is not None:
            self._doubt()
        if self._is_up is not False:
            log.warning("%s is down, trying again: %s", self._peer, failure)
        self._is_up = False
