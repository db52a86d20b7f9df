"""Payloads that the server cannot read: encrypted by the client that publishes them.

::

    payload = version ‖ nonce ‖ data key, encrypted with the key ring's ‖ nonce ‖ ciphertext
                1        12                     32 + 16                     12   length + 16 bytes

Each client has a data key of its own, at random, and encrypts it with the current key of its ring;
both by AES-256-GCM (NIST SP 800-38D). A request with a request ID has another one, made of the ID
and its payloads, so that its repeat has the same bytes. Nonces of a data key count up, so none
comes twice; those of the ring's keys are random, or made of the data key. A key of the ring
encrypts one data key for each client and for each such request: rotate it before these are 2^32
(section 8.3).

The header `slatemq-key` names the key of the ring. It is authenticated with the payload; the other
headers are not, and the server reads them, for filters. Nor is the message that a payload is of: in
the place of another one, it is decrypted. Needs the package cryptography.
"""

from __future__ import annotations

import base64
import hmac
import itertools
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final
from weakref import WeakSet

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from slatemq._secrets import KEY_HEADER, path_of, read_secret
from slatemq.errors import DataLoss, FailedPrecondition, InvalidArgument

__all__ = ["KEY_HEADER", "OVERHEAD_BYTES", "KeyRing", "new_key"]

KEY_BYTES: Final = 32
OVERHEAD_BYTES: Final = 1 + 12 + 32 + 16 + 12 + 16
"""By so much a payload grows."""

_VERSION: Final = b"\x01"
_NONCE_BYTES: Final = 12
_WRAPPED_BYTES: Final = _NONCE_BYTES + KEY_BYTES + 16
_DATA_KEYS_MAX: Final = 1024

MESSAGES_PER_DATA_KEY_MAX: Final = 1 << 32


def new_key() -> str:
    """A key for a ring: 256 random bits, in base64."""
    return base64.b64encode(os.urandom(KEY_BYTES)).decode()


def is_sealed(payload: bytes) -> bool:
    """Whether a payload has the form of an encrypted one."""
    return payload[:1] == _VERSION and len(payload) >= OVERHEAD_BYTES


class KeyRing:
    """Keys by ID. One of them is current: it encrypts; all of them decrypt.

    To rotate: add the new key to the rings of all clients, make it current in those that publish,
    and remove the old one when no message is left that needs it. Not for use in several threads; a
    process that is forked takes another data key.

    Give it to `slatemq.connect(encryption=…)`, or use it by itself.
    """

    def __init__(self, keys: Mapping[str, str], current: str) -> None:
        """Take these keys, in base64 as `new_key` makes them.

        Raises:
            InvalidArgument: A key is not one of 32 bytes, or there is no key of the current ID.
        """
        self._secrets = {key_id: _key(key_id, text) for key_id, text in keys.items()}
        self._keys = {key_id: AESGCM(secret) for key_id, secret in self._secrets.items()}
        if current not in self._keys:
            raise InvalidArgument("current", f"there is no key {current!r} in the ring")
        self.current = current
        self._opened: OrderedDict[tuple[str, bytes], AESGCM] = OrderedDict()
        self._renew()
        _rings.add(self)

    @classmethod
    def from_file(cls, file: str | Path) -> KeyRing:
        """The ring of a file: lines of `ID KEY`, the current one first. `#` begins a comment.

        Raises:
            InvalidArgument: It cannot be read, or a line of it is wrong.
        """
        try:
            # Editors may put a mark before the text that is no part of the first ID.
            lines = read_secret(path_of(file)).decode("utf-8-sig").splitlines()
        except OSError as error:
            if any(map(_is_key, str(file).split())):
                problem = "must be the path of a key file, not a key"
                raise InvalidArgument("encryption", problem) from None
            raise InvalidArgument("encryption", f"cannot read {file}: {error.strerror}") from error
        except UnicodeDecodeError:
            raise InvalidArgument("encryption", f"{file} has no keys: it is not text") from None
        keys: dict[str, str] = {}
        for number, line in enumerate(lines, 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            # Without the words of the line: where they are swapped, the first one is the key.
            problem = ""
            if len(words) != 2 or not _is_key(words[1]):
                problem = f"must be `ID KEY`, with a key of {KEY_BYTES} bytes in base64"
            elif words[0] in keys:
                problem = "has the ID of an earlier line"
            if problem:
                raise InvalidArgument("encryption", f"line {number} of {file}: {problem}")
            keys[words[0]] = words[1]
        if not keys:
            raise InvalidArgument("encryption", f"{file} has no key")
        return cls(keys, next(iter(keys)))

    def seal(
        self, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> tuple[bytes, dict[str, str]]:
        """Payload and headers as they are published."""
        return self.encrypt(payload), {**(headers or {}), KEY_HEADER: self.current}

    def open(self, payload: bytes, headers: Mapping[str, str], subject: str) -> bytes:
        """The payload of a published message; that of one without the header, as it is.

        `subject` names the message in errors, which are those of `decrypt`.
        """
        key_id = headers.get(KEY_HEADER)
        if key_id is None:
            return payload
        try:
            return self.decrypt(payload, key_id)
        except FailedPrecondition as error:
            raise FailedPrecondition(
                error.reason, f"{subject}: {error.message}", subject=key_id
            ) from None
        except DataLoss as error:
            raise DataLoss(f"{subject}: {error.message}", reason=error.reason) from None

    def encrypt(self, payload: bytes) -> bytes:
        """What is published, with the header `slatemq-key` set to `current`."""
        if self._data_key.used_count >= MESSAGES_PER_DATA_KEY_MAX:
            self._renew()
        return self._data_key.encrypt(payload)

    def for_request(self, request_id: str, payloads: Iterable[bytes]) -> DataKey:
        """What encrypts the payloads of one request, in this order, alike each time.

        The server compares a repeated request with the first. So the data key is made of its ID
        and content, with a key of the ring; other content gets another one.
        """
        secret = hmac.digest(self._secrets[self.current], b"slatemq-request", "sha256")
        made = hmac.new(secret, _framed(request_id.encode()), "sha256")
        for payload in payloads:
            made.update(_framed(payload))
        data_key = made.digest()
        return self._wrap(data_key, hmac.digest(data_key, b"nonce", "sha256")[:_NONCE_BYTES])

    def digest(self, content: bytes) -> bytes:
        """32 bytes that name content, always the same while the current key stays.

        The server, which sees them, cannot find the content by trying.
        """
        secret = hmac.digest(self._secrets[self.current], b"slatemq-digest", "sha256")
        return hmac.digest(secret, content, "sha256")

    def decrypt(self, payload: bytes, key_id: str) -> bytes:
        """What was given to `encrypt`.

        Args:
            payload: As it was published.
            key_id: The message's header `slatemq-key`.

        Raises:
            FailedPrecondition: The ring has no such key (KEY_UNKNOWN).
            DataLoss: The payload was not made with that key, or was changed (NOT_DECRYPTED).
        """
        key = self._keys.get(key_id)
        if key is None:
            raise FailedPrecondition(
                "KEY_UNKNOWN", f"the key ring has no key {key_id!r}", subject=key_id
            )
        head = len(_VERSION) + _WRAPPED_BYTES
        if not is_sealed(payload):
            raise _damaged(key_id)
        wrapped = payload[1:head]
        nonce = payload[head : head + _NONCE_BYTES]
        associated = _VERSION + key_id.encode()
        try:
            data_key = self._opened.get((key_id, wrapped))
            if data_key is None:
                plain = key.decrypt(wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:], associated)
                data_key = self._opened[key_id, wrapped] = AESGCM(plain)
                if len(self._opened) > _DATA_KEYS_MAX:
                    self._opened.popitem(last=False)
            return data_key.decrypt(nonce, payload[head + _NONCE_BYTES :], associated)
        except InvalidTag:
            raise _damaged(key_id) from None

    def _renew(self) -> None:
        """Take another data key."""
        self._data_key = self._wrap(os.urandom(KEY_BYTES), os.urandom(_NONCE_BYTES))

    def _wrap(self, data_key: bytes, nonce: bytes) -> DataKey:
        return DataKey(self._keys[self.current], self.current, data_key, nonce)


class DataKey:
    """A key that encrypts payloads, each with a number of its own."""

    def __init__(self, key: AESGCM, key_id: str, data_key: bytes, nonce: bytes) -> None:
        """`nonce` is of the encryption of `data_key` with `key`."""
        self._key_id = key_id
        self._associated = _VERSION + key_id.encode()
        self._wrapped = nonce + key.encrypt(nonce, data_key, self._associated)
        self._aead = AESGCM(data_key)
        self._numbers = itertools.count()
        self.used_count = 0

    def encrypt(self, payload: bytes) -> bytes:
        # In one step: no two threads get the same, and one used twice would betray both payloads.
        number = next(self._numbers)
        self.used_count = number + 1
        nonce = number.to_bytes(_NONCE_BYTES, "big")
        sealed = self._aead.encrypt(nonce, payload, self._associated)
        return b"".join((_VERSION, self._wrapped, nonce, sealed))

    def seal(
        self, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> tuple[bytes, dict[str, str]]:
        """As that of the ring."""
        return self.encrypt(payload), {**(headers or {}), KEY_HEADER: self._key_id}


_rings: Final[WeakSet[KeyRing]] = WeakSet()


def _renew_all() -> None:
    """Two processes must not count the nonces of one data key."""
    for ring in _rings:
        ring._renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(8, "big") + data


def _key(key_id: str, text: str) -> bytes:
    if not _is_key(text):
        # An ID that is a key was given in its place.
        place = "keys" if _is_key(key_id) else f"keys[{key_id}]"
        raise InvalidArgument(place, f"must be {KEY_BYTES} bytes in base64")
    return base64.b64decode(text)


def _is_key(text: str) -> bool:
    try:
        return len(base64.b64decode(text, validate=True)) == KEY_BYTES
    except ValueError:
        return False


def _damaged(key_id: str) -> DataLoss:
    return DataLoss(
        f"the payload was not encrypted with the key {key_id!r}, or was changed",
        reason="NOT_DECRYPTED",
    )
