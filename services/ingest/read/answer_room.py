"""What fits into an answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from libs.storage.records.metadata import MessageMetadata

__all__ = ["ResponseBudget", "fitting"]


class ResponseBudget:
    """The space left in a response: the first message of any size, then up to the bounds.

    `payload_bytes` bounds the payloads, `answer_bytes` payloads and headers together.
    """

    __slots__ = ("_answer_bytes", "_empty", "_payload_bytes")

    def __init__(self, payload_bytes: int, answer_bytes: int) -> None:
        self._payload_bytes = payload_bytes
        self._answer_bytes = answer_bytes
        self._empty = True

    def copy(self) -> ResponseBudget:
        other = ResponseBudget(0, 0)
        other.become(self)
        return other

    def become(self, other: ResponseBudget) -> None:
        self._payload_bytes = other._payload_bytes
        self._answer_bytes = other._answer_bytes
        self._empty = other._empty

    def take(self, payload_bytes: int, about_bytes: int) -> bool:
        """Whether a message fits, with `about_bytes` of headers and numbers; counts it."""
        self._payload_bytes -= payload_bytes
        self._answer_bytes -= payload_bytes + about_bytes + _FIXED_BYTES
        fits = self._empty or (self._payload_bytes >= 0 and self._answer_bytes >= 0)
        self._empty = False
        return fits

    def take_all(self, payload_bytes: int, other_bytes: int, count: int) -> bool:
        """Whether `count` messages that are alike fit; counts them if they do."""
        answer_bytes = payload_bytes + other_bytes + count * _FIXED_BYTES
        if payload_bytes > self._payload_bytes or answer_bytes > self._answer_bytes:
            return False
        self._payload_bytes -= payload_bytes
        self._answer_bytes -= answer_bytes
        self._empty = False
        return True


_FIXED_BYTES: Final = 64
"""Tags, lengths and numbers of a message or a header on the wire, at most."""


def fitting(
    message_ids: Iterable[int], found: Mapping[int, MessageMetadata], room: ResponseBudget
) -> Iterator[int]:
    """The IDs before the first message that no longer fits; missing ones take no space."""
    headers: Mapping[str, str] | None = None
    about_bytes = 0
    for message_id in message_ids:
        metadata = found.get(message_id)
        if metadata is not None:
            if metadata.headers is not headers:  # neighbours share theirs
                headers = metadata.headers
                # A character has at most 4 bytes of UTF-8, and counting them all costs more.
                about_bytes = sum(
                    4 * (len(key) + len(value)) + _FIXED_BYTES for key, value in headers.items()
                )
            if not room.take(metadata.payload_bytes, about_bytes):
                return
        yield message_id
