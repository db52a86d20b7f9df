"""A file of lines as batches of messages, in constant memory.

A batch ends where the line number is a multiple of `BATCH_LINES`, or earlier where the next line
would take it over `BATCH_BYTES`. So a run that starts at the end of a batch cuts the same batches
as the run that it continues, and can give them the same request IDs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from slatemq.cli.failures import BadInput
from slatemq.cli.publish.pointers import NoHeader, Pointer, headers_from
from slatemq.models import OutgoingMessage

BATCH_LINES = 1000

BATCH_BYTES = 4 << 20

LINE_BYTES_MAX = 64 << 20
"""The largest payload of an instance unless set otherwise; bounds our memory."""

HEADERS_MAX = 255

SKIP_BYTES = 1 << 20

PLAIN = OutgoingMessage(b"")


class LineError(BadInput):
    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"line {number}: {why}")
        self.number = number


class TooFewLines(BadInput):
    def __init__(self, count: int, asked: int) -> None:
        super().__init__(f"--skip {asked} is beyond the end: there are only {count} lines")
        self.count = count


class Batch(NamedTuple):
    """Consecutive lines, as messages.

    Attributes:
        first: Number of its first line, counted from 1.
        messages: One for each line.
        payload_bytes: Of all payloads and headers together.
        source_bytes: Of the lines in the file, newlines included.
    """

    first: int
    messages: list[OutgoingMessage]
    payload_bytes: int
    source_bytes: int

    @property
    def last(self) -> int:
        return self.first + len(self.messages) - 1


@dataclass
class LineReader:
    """Makes messages of lines: a line ends with a newline (0x0A) and nothing else.

    Attributes:
        stream: Where the lines come from.
        template: Every message but for its payload.
        pointers: Where in the line further headers are; without any, lines are not parsed.
        position: Lines read so far.
    """

    stream: BinaryIO
    template: OutgoingMessage = PLAIN
    pointers: Sequence[Pointer] = ()
    position: int = 0
    _held: tuple[OutgoingMessage, int] | None = None

    def skip(self, count: int) -> int:
        """Skip lines up to that number; return their bytes. Raises TooFewLines."""
        passed = 0
        while self.position < count:
            part = self.stream.readline(SKIP_BYTES)
            if not part:
                raise TooFewLines(self.position, count)
            passed += len(part)
            while not part.endswith(b"\n") and (part := self.stream.readline(SKIP_BYTES)):
                passed += len(part)
            self.position += 1
        return passed

    def next_batch(self) -> Batch | None:
        """The next batch; None at the end. Raises LineError, OSError."""
        first = self.position + 1
        messages: list[OutgoingMessage] = []
        total = source = 0
        while not messages or self.position % BATCH_LINES:
            taken = self._held or self._read(self.position + 1)
            if taken is None:
                break
            message, length = taken
            size = _size(message)
            if messages and total + size > BATCH_BYTES:
                self._held = taken
                break
            self._held = None
            messages.append(message)
            self.position += 1
            total += size
            source += length
        return Batch(first, messages, total, source) if messages else None

    def _read(self, number: int) -> tuple[OutgoingMessage, int] | None:
        """The next line's message, and the line's length in the file."""
        line = self.stream.readline(LINE_BYTES_MAX + 2)
        if not line:
            return None
        payload = line.removesuffix(b"\n")
        if len(payload) > LINE_BYTES_MAX:
            raise LineError(number, f"is longer than {LINE_BYTES_MAX:,} bytes")
        headers = self.template.headers
        if self.pointers:
            try:
                headers = {**headers, **headers_from(payload, self.pointers)}
            except NoHeader as error:
                raise LineError(number, str(error)) from None
            if len(headers) > HEADERS_MAX:
                raise LineError(number, f"has {len(headers)} headers; a message has at most 255")
        message = OutgoingMessage(payload, headers, *self.template[2:])
        return message, len(line)


def _size(message: OutgoingMessage) -> int:
    return len(message.payload) + sum(
        len(key.encode()) + len(value.encode()) for key, value in message.headers.items()
    )
