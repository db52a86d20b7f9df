"""How items become payloads and come back, for `Client.queue_view` and `Client.queue_commands`."""

from __future__ import annotations

import json
from typing import Any, Protocol, TypeVar, runtime_checkable

T = TypeVar("T")


@runtime_checkable
class Codec(Protocol[T]):
    """Anything with these two methods will do."""

    def encode(self, item: T, /) -> bytes:
        """The item's payload."""

    def decode(self, payload: bytes, /) -> T:
        """The item of a payload. Exceptions propagate to the caller that reads the item."""


class BytesCodec:
    """Items are payloads."""

    def encode(self, item: bytes, /) -> bytes:
        return item

    def decode(self, payload: bytes, /) -> bytes:
        return payload


class TextCodec:
    """Items are text, in UTF-8."""

    def encode(self, item: str, /) -> bytes:
        """The text in UTF-8."""
        return item.encode()

    def decode(self, payload: bytes, /) -> str:
        """The text. Raises UnicodeDecodeError."""
        return payload.decode()


class JsonCodec:
    """Items are what JSON can say."""

    def encode(self, item: Any, /) -> bytes:
        """The item as compact JSON. Raises TypeError, ValueError."""
        return json.dumps(item, separators=(",", ":"), ensure_ascii=False).encode()

    def decode(self, payload: bytes, /) -> Any:
        """The item. Raises ValueError."""
        return json.loads(payload)


BYTES = BytesCodec()
TEXT = TextCodec()
JSON = JsonCodec()
