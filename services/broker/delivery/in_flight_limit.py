"""Bounds the messages in flight of all queues together: each lease takes memory until it ends.

While the bound is reached, or lines wait because it was, lines of waiters have turns in the order
in which they came; a turn is one step of the dispatcher. So no queue whose consumers ack all the
time keeps others from claiming.

Where there is a policy, one principal may hold half of the bound, its share; in a line the waiters
of one that holds it are passed over. The lines that they are in have turns among themselves. Who
claimed is not stored, so after a restart the leases from before are of no principal, and a share is
half of what they leave: however often a broker restarts, no principal comes to hold all.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from services.broker.core.lease_table import LeaseTable
from services.broker.delivery.waiters import WaiterLine
from slatemq.errors import ResourceExhausted

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
class InFlightLimit:
    """How much more may be claimed, and the lines that wait for that."""

    _leases: LeaseTable
    _messages_max: int
    _give_turn: Callable[[WaiterLine], None]
    """Has a line look again."""
    _all: _Turns = field(default_factory=_Turns, init=False)
    _shares: dict[str, _Turns] = field(default_factory=dict, init=False)
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
        return sum(len(turns.waiting) for turns in self._shares.values())

    @property
    def note(self) -> str:
        """What an operator should know; empty while no queue waits. It names no principal."""
        notes = []
        if self._all.waiting:
            notes.append(
                f"{self._leases.in_flight_count} messages are in flight, in_flight_max is "
                f"{self._messages_max}: claims on {len(self._all.waiting)} queues wait for acks"
            )
        if self.held_up_count:
            notes.append(
                f"a principal has its share of in_flight_max, half of {self._messages_max}: its "
                f"claims on {self.held_up_count} queues wait for its acks"
            )
        return "; ".join(notes)

    # --- What may be claimed ------------------------------------------------

    def capacity(self, line: WaiterLine, principal: str = "") -> int:
        """How many messages may be claimed now for a line, and of it for a principal."""
        if not self._all.let(line) or self.is_beyond_share(line, principal):
            return 0
        room = self._room if not principal else min(self._room, self._share_left(principal))
        return max(0, room)

    def is_beyond_share(self, line: WaiterLine, principal: str) -> bool:
        """Whether a principal's waiters in a line get nothing before some of its leases end."""
        if not principal:
            return False
        turns = self._shares.get(principal)
        return self._share_left(principal) <= 0 or not (turns is None or turns.let(line))

    def refusal(self, principal: str) -> ResourceExhausted:
        """The error of a claim that was passed over, and waits no longer."""
        return ResourceExhausted(
            f"{principal!r} has {self._leases.held_by(principal)} messages in flight, as many as "
            f"one principal may of the broker's in_flight_max ({self._messages_max}): ack some; "
            f"retry in {RETRY_MS / 1000:.3g} s",
            reason="TOO_MANY_IN_FLIGHT",
            retry_after_ms=RETRY_MS,
        )

    @property
    def _room(self) -> int:
        return self._messages_max - self._leases.in_flight_count

    def _share_left(self, principal: str) -> int:
        """How much more a principal may claim, room or not."""
        left = self._messages_max - self._leases.held_by("")
        return (left + 1) // 2 - self._leases.held_by(principal)

    # --- Lines that wait ----------------------------------------------------

    def has_turn(self, line: WaiterLine) -> bool:
        """Whether a line was waiting and may claim now."""
        return line in self._all.given or any(line in one.given for one in self._shares.values())

    def wait(self, line: WaiterLine) -> None:
        """Puts a line behind those that wait, unless it waits already."""
        self._all.waiting[line] = None
        if not self._is_logged:
            self._is_logged = True
            log.warning("%s; raise it, or ack sooner", self.note)
        self.go_on()

    def wait_for_shares(self, line: WaiterLine) -> None:
        """The same for the principals of a line whose waiters were passed over."""
        for principal in line.beyond_share:
            self._shares.setdefault(principal, _Turns()).waiting[line] = None
            if not self._is_logged:
                self._is_logged = True
                log.warning("%s", self.refusal(principal).message)
        if line.beyond_share:
            self.go_on()

    def leave(self, line: WaiterLine) -> None:
        """Ends the turns of a line."""
        self._all.given.discard(line)
        for turns in self._shares.values():
            turns.given.discard(line)
        self.go_on()

    def forget(self, line: WaiterLine) -> None:
        self._all.forget(line)
        for turns in self._shares.values():
            turns.forget(line)
        self.go_on()

    def go_on(self) -> None:
        """Gives turns to those that wait, where leases have ended."""
        self._all.give(self._room, self._give_turn)
        for principal, turns in list(self._shares.items()):
            turns.give(self._share_left(principal), self._give_turn)
            if turns.is_unused:
                del self._shares[principal]
        if not (self._all.waiting or self._shares) and self._room > self._messages_max // 2:
            self._is_logged = False
