"""Signed webhooks, in the form of https://www.standardwebhooks.com.

::

    webhook-id: evt_01KJ2KH1G0J9FEYRWH6ATYF8WE       the event: the receiver's idempotency key
    webhook-timestamp: 1771761600                    seconds since 1970, of this attempt
    webhook-signature: v1,K5oZfzN95Z9UVu1EsfQmfVNQhnkZ2pj9o9NDN/H/pI4=

The signature is HMAC-SHA256 of `id.timestamp.body`, in base64; several with spaces between, while a
secret is being changed. A secret is `whsec_` and 24 to 64 bytes in base64.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping, Sequence

ID = "webhook-id"
TIMESTAMP = "webhook-timestamp"
SIGNATURE = "webhook-signature"

SECRET_PREFIX = "whsec_"
SECRET_BYTES_MIN, SECRET_BYTES_MAX = 24, 64
TOLERANCE_SECONDS = 300
"""The maximum age of a request, so that an overheard one cannot be sent again later."""


class WrongSignature(Exception):
    """The request is not from one who has the secret, or not from now."""


def make_secret() -> str:
    """A new secret."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def check_secret(secret: str) -> None:
    """Raise ValueError for what is no secret."""
    if not SECRET_BYTES_MIN <= len(_key_of(secret)) <= SECRET_BYTES_MAX:
        raise ValueError(f"a secret has {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes")


def sign(secret: str, message_id: str, body: bytes, now: float | None = None) -> dict[str, str]:
    """The headers of a request. Raises ValueError for an invalid secret."""
    timestamp = str(int(time.time() if now is None else now))
    signature = _signature(secret, _signed(message_id, timestamp, body))
    return {ID: message_id, TIMESTAMP: timestamp, SIGNATURE: f"v1,{signature}"}


def verify(
    given: Sequence[str], headers: Mapping[str, str], body: bytes, now: float | None = None
) -> str:
    """The ID of a request that one of the `given` secrets signed. Raises WrongSignature."""
    try:
        message_id, timestamp = headers[ID], headers[TIMESTAMP]
        # Bytes that are not UTF-8 are surrogates in texts, which cannot be encoded.
        signed, signatures = _signed(message_id, timestamp, body), headers[SIGNATURE].encode()
        age_seconds = (time.time() if now is None else now) - int(timestamp)
    except (KeyError, ValueError, OverflowError) as error:
        raise WrongSignature("a header of the signature is missing or wrong") from error
    if abs(age_seconds) > TOLERANCE_SECONDS:
        raise WrongSignature("the request is not from now")
    for secret in given:
        wanted = f"v1,{_signature(secret, signed)}".encode()
        # In constant time, which reveals nothing about a guess.
        if any(hmac.compare_digest(wanted, one) for one in signatures.split()):
            return message_id
    raise WrongSignature("no signature fits the body")


def _key_of(secret: str) -> bytes:
    try:
        return base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError(f"a secret is {SECRET_PREFIX} and base64") from error


def _signed(message_id: str, timestamp: str, body: bytes) -> bytes:
    return b".".join([message_id.encode(), timestamp.encode(), body])


def _signature(secret: str, signed: bytes) -> str:
    return base64.b64encode(hmac.new(_key_of(secret), signed, hashlib.sha256).digest()).decode()
