"""What clients of a simulated world must never see.

The rules are those of the documentation, said again from its words; nothing of the services is
used here. What is not certain, such as a publish without an answer, may have happened or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


class Violated(Exception):
    """A rule was broken."""


@dataclass
class _Lease:
    token: str
    deadline_ms: int
    attempt: int
    is_ended: bool = False


@dataclass
class _Copy:
    """A message in one queue."""

    leases: list[_Lease] = field(default_factory=list)
    acked: bool = False
    maybe_acked: bool = False


@dataclass
class _Sent:
    """A publish."""

    headers: Mapping[str, str]
    visible_at_ms: int
    began_ms: int
    answered: bool = False
    message_id: int = 0
    published_ids: set[int] = field(default_factory=set)


class Judge:
    """Judges each thing that a client sees, when it sees it.

    Attributes:
        filters: Of each queue, as header and value; (None, None) takes all.
    """

    def __init__(self) -> None:
        self.filters: dict[str, tuple[str | None, str | None]] = {}
        self.sent: dict[bytes, _Sent] = {}
        self.copies: dict[tuple[str, bytes], _Copy] = {}
        self.delivered = 0
        self.acked = 0
        self.redelivered = 0

    # --- Producers ----------------------------------------------------------

    def publishing(
        self, key: bytes, headers: Mapping[str, str], visible_at_ms: int, now_ms: int
    ) -> None:
        """A client is about to publish this payload, for the first time."""
        self.sent[key] = _Sent(headers, visible_at_ms, now_ms)

    def published(self, key: bytes, message_id: int) -> None:
        """The publish was answered."""
        sent = self.sent[key]
        sent.answered, sent.message_id = True, message_id
        self._same_message(key, message_id)

    # --- Consumers ----------------------------------------------------------

    def delivered_to(
        self,
        queue: str,
        key: bytes,
        headers: Mapping[str, str],
        message_id: int,
        token: str,
        attempt: int,
        deadline_ms: int,
        now_ms: int,
    ) -> None:
        """A claim gave this message."""
        self.delivered += 1
        sent = self.sent.get(key)
        if sent is None:
            raise Violated(f"{queue} delivers {key!r}, which nobody published")
        if dict(headers) != dict(sent.headers):
            raise Violated(f"{queue} delivers {key!r} with other headers: {dict(headers)}")
        if not self.takes(queue, sent.headers):
            raise Violated(f"{queue} delivers {key!r}, which its filter does not take")
        if now_ms < sent.visible_at_ms:
            raise Violated(
                f"{queue} delivers {key!r} {sent.visible_at_ms - now_ms} ms before its time"
            )
        self._same_message(key, message_id)
        copy = self.copies.setdefault((queue, key), _Copy())
        if copy.acked:
            raise Violated(f"{queue} delivers {key!r} again after an answered ack")
        for lease in copy.leases:
            if lease.token == token:
                raise Violated(f"{queue} gives one lease of {key!r} twice")
            if not lease.is_ended and now_ms < lease.deadline_ms:
                raise Violated(
                    f"{queue} leases {key!r} again {lease.deadline_ms - now_ms} ms before the "
                    f"end of attempt {lease.attempt}"
                )
            if attempt <= lease.attempt and not lease.is_ended:
                raise Violated(f"{queue} delivers {key!r} as attempt {attempt} after a later one")
        if copy.leases:
            self.redelivered += 1
        copy.leases.append(_Lease(token, deadline_ms, attempt))

    def ending(self, queue: str, key: bytes, token: str, *, is_ack: bool) -> None:
        """A client is about to ack or nack: from now on the lease may have ended."""
        copy = self.copies[queue, key]
        copy.maybe_acked |= is_ack
        for lease in copy.leases:
            if lease.token == token:
                lease.is_ended = True

    def extended(self, queue: str, key: bytes, token: str, deadline_ms: int) -> None:
        for lease in self.copies[queue, key].leases:
            if lease.token == token:
                lease.deadline_ms = deadline_ms

    def acked_by(self, queue: str, key: bytes) -> None:
        """An ack was answered: the message never comes again."""
        self.copies[queue, key].acked = True
        self.acked += 1

    # --- The end ------------------------------------------------------------

    def missing(self) -> list[tuple[str, bytes]]:
        """Answered publishes that a queue should have, and that no client tried to ack there."""
        return [
            (queue, key)
            for key, sent in self.sent.items()
            if sent.answered
            for queue in self.filters
            if self.takes(queue, sent.headers)
            and not ((copy := self.copies.get((queue, key))) and copy.maybe_acked)
        ]

    def takes(self, queue: str, headers: Mapping[str, str]) -> bool:
        name, value = self.filters[queue]
        return name is None or headers.get(name) == value

    def _same_message(self, key: bytes, message_id: int) -> None:
        """A payload that was published once is one message in all queues."""
        known = self.sent[key].published_ids
        known.add(message_id)
        if len(known) > 1:
            raise Violated(f"{key!r} was published once, and is {len(known)} messages: {known}")
