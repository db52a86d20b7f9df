"""The rules for the headers and delays of messages that callers send, in the same words for all."""

from __future__ import annotations

from typing import Final

from libs.serving.limits import HEADER_TEXT_BYTES_MAX, HEADERS_COUNT_MAX
from libs.storage.records.metadata import encode_headers
from slatemq.errors import InvalidArgument

_SHOWN_CHARACTERS: Final = 64


def encoded_headers(field: str, at: int, headers: dict[str, str]) -> bytes:
    """The headers as they are stored. Raises InvalidArgument naming the one that breaks a rule.

    `field` is where they stand in the request, such as `messages[{}].headers`, `at` the place in
    its braces: only an error puts the two together.
    """
    if "" not in headers:
        try:
            return encode_headers(headers)
        except ValueError:
            # Of the rules that it checks, find the one that was broken.
            pass
    field = field.format(at)
    if len(headers) > HEADERS_COUNT_MAX:
        raise InvalidArgument(field, f"{len(headers)} pairs, at most {HEADERS_COUNT_MAX}")
    for key, value in headers.items():
        key_bytes, value_bytes = len(key.encode()), len(value.encode())
        shown = key if len(key) <= _SHOWN_CHARACTERS else f"{key[:_SHOWN_CHARACTERS]}…"
        named = f'{field}["{shown}"]'
        if not 1 <= key_bytes <= HEADER_TEXT_BYTES_MAX:
            raise InvalidArgument(named, f"a key has 1 to {HEADER_TEXT_BYTES_MAX} bytes")
        if value_bytes > HEADER_TEXT_BYTES_MAX:
            raise InvalidArgument(
                named, f"{value_bytes} bytes, at most {HEADER_TEXT_BYTES_MAX} are allowed"
            )
    raise InvalidArgument(field, "cannot be stored")


def check_delay_ms(field: str, delay_ms: int, most_ms: int) -> int:
    """The delay. Raises InvalidArgument beyond the setting `max_message_delay_ms`."""
    if not 0 <= delay_ms <= most_ms:
        raise InvalidArgument(
            field,
            f"must be 0..{most_ms} (the setting max_message_delay_ms), not {delay_ms}",
            reason="OUT_OF_RANGE",
            metadata={"setting": "max_message_delay_ms", "most": str(most_ms)},
        )
    return delay_ms
