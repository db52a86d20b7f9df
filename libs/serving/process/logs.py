"""Structured logs on stderr: one line per event, as text or as JSON.

Log with the standard library and name the facts in `extra`::

    log.info("commit failed", extra={"shard": 3, "duration_ms": 12})

gives `2026-01-01T00:00:00.000Z ERROR broker libs.x: commit failed shard=3 duration_ms=12`, or the
same as one JSON object per line. What is logged within a span has its `trace_id` and `span_id`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Hashable
from typing import Final, TextIO

from opentelemetry import trace
from opentelemetry.trace import SpanContext

from slatemq._secrets import redacted

AUDIT_LOGGER: Final = "slatemq.audit"
"""The name of the logger of acts, for those who send its lines elsewhere."""

REPEATS_MAX = 5
"""Warnings alike that pass before they are held back."""

REPEAT_S = 30.0
"""From then on one passes in this time, until none came for as long."""

REPEATS_KNOWN = 1_000
"""Kinds of warnings remembered: there are some hundred, but a text may be of any kind."""

_KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""What the standard library keeps in a record itself; everything else came in by `extra`."""


def configure(
    service: str,
    level: str = "info",
    form: str = "text",
    stream: TextIO | None = None,
    within: SpanContext = trace.INVALID_SPAN_CONTEXT,
) -> None:
    """Send all logs of the process to `stream` (stderr); replaces what was configured before.

    Args:
        service: Name of the process, on every line.
        level: Least severity: debug, info, warning or error; the logger of acts logs all of them.
        form: `text` for people, `json` for collectors.
        stream: Where to write.
        within: The span of all that the process does, in whichever thread.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    lines = JsonLines if form == "json" else TextLines
    handler.setFormatter(lines(service, within))
    handler.addFilter(_is_worth_a_line)
    handler.addFilter(RepeatLimit())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger(AUDIT_LOGGER).setLevel(logging.INFO)


_CALLERS_FAULTS: Final = frozenset({"ExecuteBatchError", "UnicodeDecodeError"})
"""What gRPC logs as its own errors: a reader that leaves its stream, a header that is not UTF-8."""


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Whether a record matters: callers without any right must not fill the log."""
    kind = record.exc_info[0] if record.exc_info else None
    return record.name != "grpc._cython.cygrpc" or getattr(kind, "__name__", "") not in (
        _CALLERS_FAULTS
    )


class RepeatLimit(logging.Filter):
    """Lets a few of the warnings through that differ in their facts alone, then one in a while.

    While the store or a peer is down, every call and every loop has the same to say. Errors all
    pass: each names what an operator has to look at.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is in seconds."""
        super().__init__()
        self._repeats = Repeats(clock)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a record; the one after suppressed ones says how many there were.

        Records that say so already were held back by their logger.
        """
        if record.levelno != logging.WARNING or hasattr(record, "held_back"):
            return True
        held_back = self._repeats.admit((record.name, str(record.msg)))
        if held_back:
            record.held_back = held_back
        return held_back is not None


class Repeats:
    """Counts what repeats: admits the first few, then one in a while."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` is in seconds."""
        self._clock = clock
        self._seen: dict[Hashable, _Count] = {}

    def admit(self, key: Hashable) -> int | None:
        """How many alike were held back before this one; None: this one is, too."""
        now = self._clock()
        repeats = self._seen.get(key)
        if repeats is None or now - repeats.last_at > REPEAT_S:
            if len(self._seen) >= REPEATS_KNOWN:
                self._seen.clear()
            held_back = repeats.held_back if repeats is not None else 0
            repeats = self._seen[key] = _Count(now)
        elif repeats.count < REPEATS_MAX:
            held_back = 0
        elif now - repeats.passed_at > REPEAT_S:
            held_back, repeats.held_back = repeats.held_back, 0
        else:
            repeats.held_back += 1
            repeats.last_at = now
            return None
        repeats.count += 1
        repeats.last_at = repeats.passed_at = now
        return held_back


class _Count:
    def __init__(self, now: float) -> None:
        self.count = 0
        self.held_back = 0
        self.last_at = self.passed_at = now


class _Lines(logging.Formatter):
    def __init__(self, service: str, within: SpanContext = trace.INVALID_SPAN_CONTEXT) -> None:
        super().__init__()
        self._service = service
        self._within = within

    def _facts(self, record: logging.LogRecord) -> dict[str, object]:
        facts = {key: value for key, value in vars(record).items() if key not in _KNOWN}
        current = trace.get_current_span().get_span_context()
        span = current if current.is_valid else self._within
        if span.is_valid:
            facts["trace_id"] = trace.format_trace_id(span.trace_id)
            facts["span_id"] = trace.format_span_id(span.span_id)
        return facts


class TextLines(_Lines):
    """Time, level, service and logger, the message, then `key=value` for every fact."""

    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {key}={_bare(value)}" for key, value in self._facts(record).items())
        line = (
            f"{_timestamp(record)} {record.levelname} {self._service} {record.name}: "
            f"{redacted(record.getMessage())}{facts}"
        )
        if record.exc_info:
            line = f"{line}\n{redacted(self.formatException(record.exc_info))}"
        return line


class JsonLines(_Lines):
    """One JSON object per line; the facts stand beside time, level, service, logger, message."""

    def format(self, record: logging.LogRecord) -> str:
        line = self._facts(record) | {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps({key: _shown(value) for key, value in line.items()})


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _shown(value: object) -> object:
    """A value without secrets, as JSON has it."""
    return value if isinstance(value, int | float | None) else redacted(str(value))


def _bare(value: object) -> str:
    text = str(_shown(value))
    # What does not print, such as the escape that begins commands of a terminal, is escaped.
    is_bare = text and text.isprintable() and not any(c.isspace() or c in '"=' for c in text)
    return text if is_bare else json.dumps(text)
