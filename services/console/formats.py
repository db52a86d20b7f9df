"""Payloads and numbers as texts for people. What is shown may be hostile: templates escape it."""

from __future__ import annotations

import json
import time
from typing import Final, Literal, get_args

from slatemq.cli.parameters import format_duration

SHOWN_BYTES_MAX: Final = 64 * 1024
"""Of a payload; all of it can be downloaded."""

INDENTED_LENGTH_MAX: Final = 4 * SHOWN_BYTES_MAX
"""Of JSON: indents of what is deeply nested are a thousand times as long."""

HEX_BYTES_MAX: Final = 8 * 1024
ROW_BYTES: Final = 16

PayloadForm = Literal["text", "json", "hex"]
FORMS: Final[tuple[PayloadForm, ...]] = get_args(PayloadForm)

_INDENTING: Final = json.JSONEncoder(indent=2, ensure_ascii=False)

_UNITS: Final = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s"))


def span(length_ms: float | None) -> str:
    """A length of time with two digits or more: `4.2 s`, `37 min`, `3 d`."""
    if length_ms is None:
        return "–"
    for unit_ms, name in _UNITS:
        count = length_ms / unit_ms
        if count >= 1:
            return f"{count:.1f} {name}" if count < 10 else f"{count:.0f} {name}"
    return f"{length_ms:.0f} ms"


def ago(time_ms: int) -> str:
    """A point in time as its distance from now; a dash for 0, which is none."""
    if not time_ms:
        return "–"
    distance_ms = time.time() * 1000 - time_ms
    return f"{span(distance_ms)} ago" if distance_ms >= 0 else f"in {span(-distance_ms)}"


def setting(value: int, name: str) -> str:
    """A setting of the instance in the unit that its name ends with, and as it is stored."""
    readable = ""
    if "_bytes" in name:
        readable = size(value)
    elif name.endswith(("_s", "_ms")):
        readable = format_duration(value * (1000 if name.endswith("_s") else 1))
    return f"{readable} ({value:,})" if readable else f"{value:,}"


def size(count: int) -> str:
    """A number of bytes: `512 B`, `1.4 KiB`."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def rate(per_s: float | None) -> str:
    if per_s is None:
        return "–"
    return f"{per_s:,.0f}" if per_s >= 10 or per_s == 0 else f"{per_s:.1f}"


def best_form(payload: bytes) -> PayloadForm:
    try:
        text = payload[:SHOWN_BYTES_MAX].decode()
    except UnicodeDecodeError as error:
        # Cut within a character at the end: still text.
        is_cut = len(payload) > SHOWN_BYTES_MAX and error.start >= SHOWN_BYTES_MAX - 4
        return "text" if is_cut else "hex"
    if any(ord(char) < 32 and char not in "\t\r\n" for char in text):
        return "hex"
    return "json" if text.lstrip()[:1] in ("{", "[") and _parsed(payload) is not None else "text"


def shown(payload: bytes, form: PayloadForm) -> tuple[str, str]:
    """The text of a payload, and what to know about it; empty: nothing."""
    if form == "hex":
        return _hex(payload[:HEX_BYTES_MAX]), _cut(payload, HEX_BYTES_MAX)
    if form == "json":
        parsed = _parsed(payload)
        if parsed is None:
            text, cut = shown(payload, "text")
            return text, f"This is not JSON, or too large: shown as text. {cut}".strip()
        return parsed, ""
    text = payload[:SHOWN_BYTES_MAX].decode("utf-8", "replace")
    return text, _cut(payload, SHOWN_BYTES_MAX)


def _cut(payload: bytes, bytes_max: int) -> str:
    if len(payload) <= bytes_max:
        return ""
    return f"The first {size(bytes_max)} of {size(len(payload))}: download it for all."


def _parsed(payload: bytes) -> str | None:
    """JSON with indents; None for what is none, or too large to show."""
    if len(payload) > SHOWN_BYTES_MAX:
        return None
    indented, length = [], 0
    try:
        for part in _INDENTING.iterencode(json.loads(payload)):
            indented.append(part)
            length += len(part)
            if length > INDENTED_LENGTH_MAX:
                return None
        text = "".join(indented)
        text.encode()  # Escapes may name half a character, which no page can have.
    except (ValueError, RecursionError):
        return None
    return text


def _hex(data: bytes) -> str:
    return "\n".join(
        f"{at:08x}  {row.hex(' '):<{ROW_BYTES * 3}} {_printable(row)}"
        for at in range(0, len(data), ROW_BYTES)
        if (row := data[at : at + ROW_BYTES])
    )


def _printable(row: bytes) -> str:
    return "".join(chr(byte) if 32 <= byte < 127 else "·" for byte in row)
