"""Bounds the messages in flight of all queues together: each lease takes memory until it ends.

While the bound is reached, or lines wait because it was, lines of waiters have turns in the order
in which they came; a turn is one step of the dispatcher. So no queue whose consumers ack all the
time keeps others from claiming.

Where there is a policy, one principal may hold half of the bound, or less where the policy limits
it: its share. In a line the waiters of one that holds its share are passed over, and the lines that
they are in have turns among themselves. Who claimed is not stored, so after a restart the leases
from before are of no principal, and half of what they leave is the most: however often a broker
restarts, no principal comes to hold all.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from services.broker.core.lease_table import LeaseTable
from services.broker.delivery.waiters import WaiterLine
from slatemq._counts import counted
from slatemq.errors import ResourceExhausted

if TYPE_CHECKING:
    from libs.access.quotas import PrincipalQuota

TURNS_AT_ONCE: Final = 16
"""Lines that have a turn at the same time: each may wait for an ingest."""

RETRY_MS: Final = 1_000
"""When to claim again: when a lease ends is not known."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Turns:
    """Lines that wait for the same leases to end, and those that have a turn since some have."""

    waiting: OrderedDict[WaiterLine, None] = field(default_factory=OrderedDict)
    given: set[WaiterLine] = field(default_factory=set)

    @property
    def is_unused(self) -> bool:
        return not (self.waiting or self.given)

    def let(self, line: WaiterLine) -> bool:
        """Whether a line may claim: it has a turn, or needs none."""
        return self.is_unused or line in self.given

    def give(self, room: int, give_turn: Callable[[WaiterLine], None]) -> None:
        while self.waiting and len(self.given) < min(room, TURNS_AT_ONCE):
            line, _ = self.waiting.popitem(last=False)
            self.given.add(line)
            give_turn(line)

    def forget(self, line: WaiterLine) -> None:
        self.waiting.pop(line, None)
        self.given.discard(line)


@dataclass(eq=False)
class _Share(_Turns):
    """The same for the leases of one principal."""

    quota: PrincipalQuota | None = None


@dataclass(eq=False)
class InFlightLimit:
    """How much more may be claimed, and the lines that wait for that."""

    _leases: LeaseTable
    _messages_max: int
    _give_turn: Callable[[WaiterLine], None]
    """Has a line look again."""
    _all: _Turns = field(default_factory=_Turns, init=False)
    _shares: dict[str, _Share] = field(default_factory=dict, init=False)
    """By principal, of those with waiters that were passed over."""
    _is_logged: bool = field(default=False, init=False)

    @property
    def messages_count(self) -> int:
        """Messages in flight of all queues."""
        return self._leases.in_flight_count

    @property
    def waiting_count(self) -> int:
        """Queues whose claims wait for other queues' leases to end."""
        return len(self._all.waiting)

    @property
    def held_up_count(self) -> int:
        """Queues with claims of principals that wait for leases of their own to end."""
        return sum(len(share.waiting) for share in self._shares.values())

    @property
    def note(self) -> str:
        """What an operator should know; empty while no queue waits. It names no principal."""
        notes = []
        if self._all.waiting:
            count = self._leases.in_flight_count
            in_flight = counted(count, "message is in flight", "messages are in flight")
            notes.append(
                f"{in_flight}, in_flight_max is {self._messages_max}: claims on "
                f"{counted(len(self._all.waiting), 'queue')} wait for acks"
            )
        if self.held_up_count:
            notes.append(
                f"claims on {counted(self.held_up_count, 'queue')} wait for acks of their own "
                "principals, which have as many messages in flight as one may"
            )
        return "; ".join(notes)

    # --- What may be claimed ------------------------------------------------

    def capacity(
        self, line: WaiterLine, principal: str = "", quota: PrincipalQuota | None = None
    ) -> int:
        """How many messages may be claimed now for a line, and of it for a principal."""
        if not self._all.let(line) or self.is_beyond_share(line, principal, quota):
            return 0
        room = self._room
        if principal:
            room = min(room, self._share_left(principal, quota))
        return max(0, room)

    def is_beyond_share(
        self, line: WaiterLine, principal: str, quota: PrincipalQuota | None
    ) -> bool:
        """Whether a principal's waiters in a line get nothing before some of its leases end."""
        if not principal:
            return False
        share = self._shares.get(principal)
        has_to_wait = share is not None and not share.let(line)
        return has_to_wait or self._share_left(principal, quota) <= 0

    def refusal(self, principal: str, quota: PrincipalQuota | None) -> ResourceExhausted:
        """The error of a claim that was passed over, and waits no longer."""
        if quota is not None and self._half > self._limit_of(quota):
            return quota.refuse_claim()
        return ResourceExhausted(
            f"{self._half_note(principal)}: ack some; retry in {RETRY_MS / 1000:.3g} s",
            reason="TOO_MANY_IN_FLIGHT",
            retry_after_ms=RETRY_MS,
        )

    def _half_note(self, principal: str) -> str:
        return (
            f"{principal!r} has {counted(self._leases.held_by(principal), 'message')} in flight, "
            f"as many as one principal may of the broker's in_flight_max ({self._messages_max})"
        )

    @property
    def _room(self) -> int:
        return self._messages_max - self._leases.in_flight_count

    @property
    def _half(self) -> int:
        """The most that any principal may hold."""
        return (self._messages_max - self._leases.held_by("") + 1) // 2

    def _limit_of(self, quota: PrincipalQuota | None) -> int:
        limit = None if quota is None else quota.in_flight_max
        return self._messages_max if limit is None else limit

    def _share_left(self, principal: str, quota: PrincipalQuota | None) -> int:
        """How much more a principal may claim, room or not."""
        return min(self._half, self._limit_of(quota)) - self._leases.held_by(principal)

    # --- Lines that wait ----------------------------------------------------

    def has_turn(self, line: WaiterLine) -> bool:
        """Whether a line was waiting and may claim now."""
        return line in self._all.given or any(
            line in self._shares[one].given for one in line.shares
        )

    def wait(self, line: WaiterLine) -> None:
        """Puts a line behind those that wait, unless it waits already."""
        self._all.waiting[line] = None
        self._log(f"{self.note}; raise it, or ack sooner")
        self.go_on()

    def wait_for_shares(self, line: WaiterLine) -> None:
        """The same for the principals of a line whose waiters were passed over."""
        for principal, quota in line.beyond_share.items():
            share = self._shares.setdefault(principal, _Share())
            share.quota = quota
            share.waiting[line] = None
            line.shares.add(principal)
            if self._limit_of(quota) >= self._half:  # Else that is as its operator wants it.
                self._log(f"{self._half_note(principal)}: it has to ack some")
            self._share_out(principal)

    def _log(self, warning: str) -> None:
        if not self._is_logged:
            self._is_logged = True
            log.warning("%s", warning)

    def leave(self, line: WaiterLine) -> None:
        """Ends the turns of a line."""
        self._all.given.discard(line)
        for principal in list(line.shares):
            self._shares[principal].given.discard(line)
            self._share_out(principal, line)
        self.go_on()

    def forget(self, line: WaiterLine) -> None:
        self._all.forget(line)
        for principal in list(line.shares):
            self._shares[principal].forget(line)
            self._share_out(principal, line)
        self.go_on()

    def go_on(self) -> None:
        """Gives turns to those that wait, where leases have ended."""
        self._all.give(self._room, self._give_turn)
        freed = self._leases.take_freed()
        # Those from before the start leave more to all.
        for principal in list(self._shares) if "" in freed else freed & self._shares.keys():
            self._share_out(principal)
        if not (self._all.waiting or self._shares) and self._room > self._messages_max // 2:
            self._is_logged = False

    def _share_out(self, principal: str, line: WaiterLine | None = None) -> None:
        """Gives turns where a principal has room; forgets it, and this line, without a use."""
        share = self._shares[principal]
        share.give(self._share_left(principal, share.quota), self._give_turn)
        if line is not None and line not in share.waiting and line not in share.given:
            line.shares.discard(principal)
        if share.is_unused:
            del self._shares[principal]
