"""Plain text of messages that were encrypted, which must not be sent without keys.

Clients with keys decrypt what they print, and leave the header that says it was encrypted.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from slatemq._secrets import KEY_HEADER
from slatemq.errors import DataLoss, FailedPrecondition

if TYPE_CHECKING:
    from slatemq.encryption import KeyRing

_MARK = KEY_HEADER.encode()

_REMEDY = (
    f"the header {KEY_HEADER} says that the payload is encrypted, but it is plain text: give the "
    "keys with --encryption-keys or SLATEMQ_ENCRYPTION_KEYS, or remove the header to send it so"
)


def sealing_problem(
    payload: bytes, headers: Mapping[str, str], has_keys: bool, *, is_decrypted: bool = False
) -> str:
    """Why a client with or without keys must not send this; empty when it may.

    Without keys the header of an encrypted payload would be sent with plain text, and with keys
    what is encrypted would be again. `is_decrypted`: it is known to be plain text.
    """
    if KEY_HEADER not in headers:
        return ""
    is_sealed = not is_decrypted and _is_sealed(payload)
    if is_sealed and has_keys:
        return "the payload is encrypted already, since it was read without keys: give none here"
    return "" if is_sealed or has_keys else _REMEDY


def not_decrypted_problem(payload: bytes, key_id: str, ring: KeyRing | None) -> str:
    """Why a payload that an export could not decrypt must not be sent; empty when it may."""
    problem = (
        "the payload could not be decrypted when it was exported: remove the header "
        f"{KEY_HEADER}, or leave it out"
    )
    if not _is_sealed(payload):
        return problem
    try:
        if ring is not None:
            ring.decrypt(payload, key_id)
    except FailedPrecondition:
        return (
            f"the payload is encrypted with the key {key_id!r}, which is not among the keys given: "
            "import such entries apart, without keys"
        )
    except DataLoss:
        return problem
    return ""


def publish_problem(payload: bytes, headers: Mapping[str, str], has_keys: bool) -> str:
    """The same for a publish, whose payload may be what a command has printed with --json."""
    may_be_printed = not has_keys and _MARK in payload
    if may_be_printed and any(map(_shows_plain_text, (payload, *payload.splitlines()))):
        return _REMEDY
    return sealing_problem(payload, headers, has_keys)


def _shows_plain_text(text: bytes) -> bool:
    """Whether it is a printed message that was decrypted."""
    try:
        message = json.loads(text)
        headers = message["headers"]
        encoded = message.get("payload_base64")
        payload = base64.b64decode(encoded) if encoded else message["payload"].encode()
        return KEY_HEADER in headers and not _is_sealed(payload)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return False


def _is_sealed(payload: bytes) -> bool:
    is_sealed: bool = import_module("slatemq.encryption").is_sealed(payload)
    return is_sealed
