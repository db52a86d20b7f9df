"""What people write: expressions, files of queues, settings and access; encrypted payloads."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from libs.access.jwt_tokens import JwtTokens
from libs.access.policy import Policy
from libs.access.principals import Principal
from libs.access.token_file import TokenFile
from libs.documents import Document
from libs.events.settings import read_settings, variable_of
from libs.filters.allowance import TooSlow
from libs.filters.expressions import Filter, Priority, context
from libs.filters.index import RuleSet, facts
from slatemq.encryption import KEY_HEADER, KeyRing
from slatemq.errors import DataLoss
from slatemq.textqueue.parsing import parse
from tests.fuzz.compare import Wrong, refused, same

_HEADERS: Final = {"region": "eu", "n": "3"}
_FIELDS: Final = (6, 1, 2, 4, 5)
_SIZE: Final = 3
_MESSAGE: Final = context(facts(_HEADERS, _FIELDS, -1, _SIZE))


def expression(data: bytes) -> None:
    """A filter or a priority, checked and evaluated; the index must agree with it alone."""
    source = data[1:].decode(errors="replace")
    if data[:1] == b"p":
        found, _ = Priority(source).explain(_MESSAGE)
        if found is not None and not 0 <= found <= 255:
            raise Wrong(f"priority {found}")
        return
    matches = Filter(source).matches(_MESSAGE)
    rules = RuleSet()
    rules.replace("q", source)
    try:
        routed = rules.route(dict(_HEADERS), _FIELDS, -1, _SIZE)
    except TooSlow:
        return
    same(["q"] if matches else [], [queue for queue, _ in routed], "routes")


def queue_file(data: bytes) -> None:
    """A queue file: each byte of it is in its entries."""
    document = parse(data)
    same(document.dump(), data, "queue file")
    parse(data, strict=True)


_PRINCIPAL: Final = Principal("shop", "token", {"tenant": "shop"}, None)


def document(data: bytes) -> None:
    """A file of the kind that the first byte chooses: a policy, tokens, issuers, settings, keys."""
    if data:
        _DOCUMENTS[data[0] % len(_DOCUMENTS)](data[1:])


def _policy(data: bytes) -> None:
    policy = Policy(Document("policy", data.decode(errors="replace")))
    rights = policy.rights(_PRINCIPAL)
    headers = {"tenant": "shop", "region": "eu"}
    kept = rights.decide("publish", "orders", headers).is_permitted
    same(kept, rights.evaluate("publish", "orders", headers).is_permitted, "decision")
    policy.limits(_PRINCIPAL)
    policy.certificates.matches("shop")


def _tokens(data: bytes) -> None:
    len(TokenFile(Document("tokens", data.decode(errors="replace"))))


def _issuers(data: bytes) -> None:
    JwtTokens(Document("issuers", data.decode(errors="replace")))


def _settings(data: bytes) -> None:
    variable = variable_of("queue.redis.max_retries")
    read_settings(_file(data), {variable: data[:10].decode("latin-1")})


def _keys(data: bytes) -> None:
    KeyRing.from_file(_file(data))


def _file(data: bytes) -> Path:
    path = Path(_FOLDER.name) / "file"
    path.write_bytes(data)
    path.chmod(0o600)
    return path


_FOLDER: Final = tempfile.TemporaryDirectory(prefix="slatemq-fuzz-file-")
_DOCUMENTS: Final[tuple[Callable[[bytes], None], ...]] = (
    _policy,
    _tokens,
    _issuers,
    _settings,
    _keys,
)

_RING: Final = KeyRing({"one": base64.b64encode(bytes(32)).decode()}, "one")
_SEALED: Final = b"a payload"


def encryption(data: bytes) -> None:
    """An encrypted payload that was changed is refused, and only that: bytes are put at a place."""
    refused(lambda: _RING.open(data, {KEY_HEADER: "one"}, "a message"), DataLoss, "foreign bytes")
    sealed = _RING.for_request("request", [_SEALED]).encrypt(_SEALED)
    place, put = (data[0] % len(sealed), data[1:]) if data else (0, b"")
    changed = sealed[:place] + put + sealed[place + len(put) :]
    if changed != sealed:
        refused(lambda: _RING.decrypt(changed, "one"), DataLoss, "a changed payload")
    same(_RING.decrypt(sealed, "one"), _SEALED, "payload")
