"""Bounds the messages in flight of all queues together: each lease takes memory until it ends.

While the bound is reached, or lines wait because it was, lines of waiters have turns in the order
in which they came; a turn is one step of the dispatcher. So no queue whose consumers ack all the
time keeps others from claiming.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from services.broker.core.lease_table import LeaseTable
from services.broker.delivery.waiters import WaiterLine

TURNS_AT_ONCE = 16
"""Lines that have a turn at the same time: each may wait for an ingest."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class InFlightLimit:
    """How much more may be claimed, and the lines that wait for that."""

    _leases: LeaseTable
    _messages_max: int
    _give_turn: Callable[[WaiterLine], None]
    """Has a line look again."""
    _waiting: OrderedDict[WaiterLine, None] = field(default_factory=OrderedDict, init=False)
    _turns: set[WaiterLine] = field(default_factory=set, init=False)
    _is_logged: bool = field(default=False, init=False)

    @property
    def messages_count(self) -> int:
        """Messages in flight of all queues."""
        return self._leases.in_flight_count

    @property
    def waiting_count(self) -> int:
        """Queues whose claims wait for other queues' leases to end."""
        return len(self._waiting)

    @property
    def note(self) -> str:
        """What an operator should know; empty while no queue waits."""
        if not self._waiting:
            return ""
        return (
            f"{self._leases.in_flight_count} messages are in flight, in_flight_max is "
            f"{self._messages_max}: claims on {len(self._waiting)} queues wait for acks"
        )

    def capacity(self, line: WaiterLine) -> int:
        """How many messages may be claimed for a line now."""
        if (self._waiting or self._turns) and line not in self._turns:
            return 0
        return max(0, self._messages_max - self._leases.in_flight_count)

    def has_turn(self, line: WaiterLine) -> bool:
        """Whether a line was waiting and may claim now."""
        return line in self._turns

    def wait(self, line: WaiterLine) -> None:
        """Puts a line behind those that wait, unless it waits already."""
        self._waiting[line] = None
        if not self._is_logged:
            self._is_logged = True
            log.warning("%s; raise it, or ack sooner", self.note)
        self.go_on()

    def leave(self, line: WaiterLine) -> None:
        self._turns.discard(line)
        self.go_on()

    def forget(self, line: WaiterLine) -> None:
        self._waiting.pop(line, None)
        self.leave(line)

    def go_on(self) -> None:
        """Gives turns to those that wait, where leases have ended."""
        room = self._messages_max - self._leases.in_flight_count
        while self._waiting and len(self._turns) < min(room, TURNS_AT_ONCE):
            line, _ = self._waiting.popitem(last=False)
            self._turns.add(line)
            self._give_turn(line)
        if not self._waiting and room > self._messages_max // 2:
            self._is_logged = False
