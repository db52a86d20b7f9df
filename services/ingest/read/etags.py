"""The etag of a message: one part for its payload record, one for its headers.

So the etag after a change of one part is known without the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final, NamedTuple

from libs.storage.records.metadata import encode_headers

_PART_BYTES: Final = 10


class Etag(NamedTuple):
    """Opaque to clients. Large payloads are cheap: their URI stands for them."""

    payload: str
    headers: str

    @classmethod
    def parse(cls, text: str) -> Etag:
        """The inverse of `str`. Any other text becomes an etag that no message has."""
        payload, _, headers = text.partition("-")
        return cls(payload, headers)

    def __str__(self) -> str:
        return f"{self.payload}-{self.headers}"


def etag_of(record: bytes, headers: Mapping[str, str]) -> Etag:
    return Etag(_digest(record), headers_etag(headers))


def headers_etag(headers: Mapping[str, str]) -> str:
    """The part of an etag that stands for the headers."""
    return _digest(encode_headers(headers))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_PART_BYTES).hexdigest()
