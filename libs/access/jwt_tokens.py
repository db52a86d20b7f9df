"""Tokens of other systems: JSON Web Tokens (RFC 7519), checked with their issuer's keys (RFC 7517).

The issuers are in a file::

    issuers:
      - issuer: https://kubernetes.default.svc.cluster.local
        audience: slatemq
        jwks_url: https://kubernetes.default.svc/openid/v1/jwks
        ca_file: /var/run/secrets/kubernetes.io/serviceaccount/ca.crt
        token_file: /var/run/secrets/kubernetes.io/serviceaccount/token
        principal_prefix: "k8s:"

Without `jwks_url` the keys are where the issuer's `/.well-known/openid-configuration` (OpenID
Connect Discovery 1.0) says.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeGuard

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from libs.access.ending import Connections
from libs.access.principals import NAME_LENGTH_MAX, Principal
from libs.access.reloading import ReloadedFile
from libs.access.token_checks import too_many_checks
from libs.documents import Document
from slatemq.errors import Unauthenticated, Unavailable

log = logging.getLogger(__name__)

ALGORITHMS: Final = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA",
)  # fmt: skip
"""Signatures by a private key alone: with HMAC, anyone that can check a token could make one."""

RSA_BITS_MIN: Final = 2048
"""Shorter keys must not be used (RFC 7518, section 3.3): who factors one can sign tokens."""

KEYS_BYTES_MAX: Final = 1 << 20
FETCH_TIMEOUT_S: Final = 5.0
"""How long a server may be silent while its answer is read."""

FETCH_S_MAX: Final = 10.0
"""How long the keys are waited for altogether: what comes a byte at a time is no answer."""

REFRESH_WAIT_S: Final = 1.0
"""How long tokens whose key is known wait for newer keys, once for each time they are asked for."""

WAITING_MAX: Final = 64
"""Tokens of an issuer that wait for keys that are not known. Forged ones name such keys."""

KEYS_AGE_S_MAX: Final = 600.0
"""Keys older than this are fetched again, so that one that its issuer has withdrawn ends."""

KEYS_OUTAGE_S_MAX: Final = 3600.0
"""How long keys stay in use while their issuer does not answer."""

FETCH_AGAIN_S: Final = 1.0
"""Between two fetches, however many tokens name a key that is not there: so long they wait."""

RETRY_S: Final = 10.0
"""After a fetch that failed, so long no other one is tried."""

Key = jwt.PyJWK | RSAPublicKey
"""One of RSA that does not say its algorithm is for each of them: a PyJWK would be for RS256."""

KeyName = tuple[str | None, str]
"""The ID of a key, and its type (`kty`): keys of two types may have one ID (RFC 7517, 4.5). The ID
is None where a token need not name it."""

_KEY_TYPES: Final = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}
"""The type of the keys for an algorithm, by its first two letters."""

_Audience = Annotated[str, msgspec.Meta(min_length=1)]
_Url = Annotated[str, msgspec.Meta(pattern=r"^https?://[^/]+")]


class Issuer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An issuer of tokens.

    Attributes:
        issuer: What the claim `iss` must be.
        audience: One of which the claim `aud` must have.
        jwks_url: Where its keys are; None: where its OpenID configuration says.
        ca_file: The certificates that its server's must be signed by; None: those of the system.
        token_file: A file with the bearer token that reading the keys needs; None: none.
        algorithms: The signatures that are accepted.
        principal_claim: The claim that is the principal's name.
        principal_prefix: Precedes the name, so that issuers cannot name each other's principals.
        attributes: The claims that become attributes.
        clock_skew_s: How far its clock may be from ours, in seconds.
    """

    issuer: _Url
    audience: Annotated[tuple[_Audience, ...], msgspec.Meta(min_length=1)] | _Audience
    jwks_url: _Url | None = None
    ca_file: str | None = None
    token_file: str | None = None
    algorithms: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("RS256", "ES256")
    principal_claim: str = "sub"
    principal_prefix: str = ""
    attributes: tuple[str, ...] = ()
    clock_skew_s: Annotated[int, msgspec.Meta(ge=0, le=300)] = 30

    @property
    def key_source(self) -> KeySource:
        """What decides which keys it has: entries that agree here share them."""
        return self.issuer, self.jwks_url, self.ca_file, self.token_file


KeySource = tuple[str, str | None, str | None, str | None]


class JwtTokens:
    """Checks tokens of the issuers of a file.

    Attributes:
        keys: Of each issuer.
    """

    def __init__(
        self, document: Document, known: Mapping[KeySource, IssuerKeys] = MappingProxyType({})
    ) -> None:
        """Check the file, and go on with the keys that are `known` by its version before.

        Raises:
            InvalidArgument: Something is wrong; names the key and the line.
        """
        for key in document.values:
            if key != "issuers":
                raise document.error(str(key), "unknown; a file of issuers has `issuers`")
        issuers = document.convert("issuers", document.get("issuers", []), tuple[Issuer, ...])
        self._issuers: dict[str, Issuer] = {}
        self.keys: dict[KeySource, IssuerKeys] = {}
        for number, issuer in enumerate(issuers):
            path = f"issuers[{number}]"
            for place, algorithm in enumerate(issuer.algorithms):
                if algorithm not in ALGORITHMS:
                    problem = f"must be one of {', '.join(ALGORITHMS)}"
                    raise document.error(f"{path}.algorithms[{place}]", problem)
            for name, url in (("issuer", issuer.issuer), ("jwks_url", issuer.jwks_url)):
                if url is not None and not _is_private(url):
                    problem = "must begin with https://, unless it is on this machine"
                    raise document.error(f"{path}.{name}", problem)
            if issuer.issuer in self._issuers:
                raise document.error(f"{path}.issuer", "is given twice")
            _check_files(document, path, issuer)
            self._issuers[issuer.issuer] = issuer
            source = issuer.key_source
            self.keys[source] = known.get(source) or IssuerKeys(issuer)

    async def check(self, token: str) -> Principal:
        """The principal that a token proves.

        Raises:
            Unauthenticated: It is forged, expired, for others, or of an unknown issuer.
            ResourceExhausted: Too many tokens wait for keys of its issuer.
            Unavailable: The keys of its issuer cannot be read now.
        """
        try:
            # Only to find the keys; nothing of it is believed before the signature is checked.
            claimed = jwt.decode(token, options={"verify_signature": False})
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, ValueError, RecursionError) as error:
            raise _refused(
                "is neither a JSON Web Token nor one that `slatemq access token` makes (smq_…): "
                "check that it was copied whole"
            ) from error
        name = claimed.get("iss")
        issuer = self._issuers.get(name) if isinstance(name, str) else None
        if issuer is None:
            raise _refused("has an issuer that this service does not know")
        algorithm = header.get("alg")
        if algorithm not in issuer.algorithms:
            raise _refused("is not valid")
        keys = self.keys[issuer.key_source]
        key = await keys.get((header.get("kid"), _KEY_TYPES[algorithm[:2]]))
        try:
            claims = jwt.decode(
                token,
                key,
                algorithms=issuer.algorithms,
                audience=issuer.audience,
                issuer=issuer.issuer,
                leeway=issuer.clock_skew_s,
                options={"require": ["exp", "iss", "aud", issuer.principal_claim]},
            )
            principal = _principal(issuer, claims)
        except jwt.ExpiredSignatureError as error:
            raise _refused("has expired") from error
        except jwt.InvalidAudienceError as error:
            raise _refused("is for another audience") from error
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError) as error:
            raise _refused("is not valid") from error
        return principal


def issuers_file(file: Path) -> ReloadedFile[JwtTokens]:
    """A file of issuers: what is known of their keys outlasts its changes.

    Raises:
        InvalidArgument: As of JwtTokens, and where it cannot be read.
    """
    known: dict[KeySource, IssuerKeys] = {}

    def read(document: Document) -> JwtTokens:
        nonlocal known
        tokens = JwtTokens(document, known)
        known = tokens.keys
        return tokens

    return ReloadedFile.of_document(file, read)


class IssuerKeys:
    """The public keys of one issuer, fetched when they are first needed, and kept up to date."""

    def __init__(self, issuer: Issuer) -> None:
        self._issuer = issuer
        self._keys: dict[KeyName, Key] = {}
        self._fetched_s = self._tried_s = -KEYS_OUTAGE_S_MAX
        self._fetching: asyncio.Lock | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting_count = 0
        self._refreshing: asyncio.Task[None] | None = None
        self._refreshing_s = 0.0
        # Of its own: an issuer that hangs holds up neither another one nor work of other kinds.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="access-keys")

    async def get(self, name: KeyName) -> Key:
        """The key of this name; of no ID, where the token has none: the issuer may have one alone.

        Raises:
            Unauthenticated: The issuer has no such key.
            ResourceExhausted: Too many tokens wait for its keys.
            Unavailable: Its keys cannot be read.
        """
        now = time.monotonic()
        age_s = now - self._fetched_s
        if self._find(name) is None or age_s > KEYS_OUTAGE_S_MAX:
            await self._wait_for_keys(now)
        elif age_s > KEYS_AGE_S_MAX:
            await self._refresh(now)
        if time.monotonic() - self._fetched_s > KEYS_OUTAGE_S_MAX:
            raise self._down()
        key = self._find(name)
        if key is None and self._tried_s > self._fetched_s:
            raise self._down()  # It may be a new one.
        if key is None:
            raise _refused("is signed with a key that its issuer does not have")
        return key

    def _find(self, name: KeyName) -> Key | None:
        key_id, key_type = name
        has_ids = any(one is not None for one, _ in self._keys)
        return self._keys.get((key_id if has_ids else None, key_type))

    def _down(self) -> Unavailable:
        return Unavailable(
            f"the keys of {self._issuer.issuer} cannot be read", reason="ISSUER_DOWN"
        )

    async def _wait_for_keys(self, now: float) -> None:
        """Fetch the keys for a token whose key is not known: forged ones wait here, too."""
        if self._waiting_count >= WAITING_MAX:
            raise too_many_checks()
        self._waiting_count += 1
        try:
            await self._fetch(now)
        finally:
            self._waiting_count -= 1

    async def _refresh(self, now: float) -> None:
        """Fetch the keys again, for a token whose key is known but may have been withdrawn.

        It waits for an issuer that answers, and not long for one that does not: all that come later
        go by what is known.
        """
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._fetch(now))
            self._refreshing_s = now
        left_s = self._refreshing_s + REFRESH_WAIT_S - now
        if left_s > 0:
            await asyncio.wait([self._refreshing], timeout=left_s)

    async def _fetch(self, asked_s: float) -> None:
        """Fetch the keys, if none were fetched since `asked_s`; not for a while after a failure."""
        if self._fetching is None:
            self._fetching = asyncio.Lock()
        async with self._fetching:
            if self._reading is not None:  # left by a call that ended before it
                await asyncio.wait([self._reading])
            since_s = time.monotonic() - self._tried_s
            has_failed = self._tried_s > self._fetched_s
            if self._tried_s >= asked_s or (has_failed and since_s < RETRY_S):
                return
            if not has_failed:
                # Refused at once, a good token would be called forged: its key may be a second old.
                await asyncio.sleep(FETCH_AGAIN_S - since_s)
            self._tried_s = time.monotonic()
            # Of its own: what a call that is cancelled began would else count as failed.
            self._reading = asyncio.create_task(self._take_keys())
            await asyncio.shield(self._reading)

    async def _take_keys(self) -> None:
        try:
            keys = await self._read_keys()
        except (OSError, ValueError, HTTPException, jwt.PyJWTError, RecursionError) as error:
            facts = {"issuer": self._issuer.issuer, "error": str(error)}
            log.warning("cannot read the keys of an issuer", extra=facts)
            return
        self._keys, self._fetched_s = keys, time.monotonic()

    async def _read_keys(self) -> dict[KeyName, Key]:
        """As `fetch_keys`, but raises TimeoutError where that takes too long.

        Then its thread ends with its connections, soon but not at once: the next one waits for it.
        """
        connections = Connections()
        loop = asyncio.get_running_loop()
        answer = loop.run_in_executor(self._thread, fetch_keys, self._issuer, connections)
        try:
            await asyncio.wait([answer], timeout=FETCH_S_MAX)
            if not answer.done():
                answer.cancel()
                raise TimeoutError(f"no whole answer within {FETCH_S_MAX:g} s")
            return answer.result()
        finally:
            connections.end()
            del answer  # An error would keep its connection as long as this frame.


def fetch_keys(issuer: Issuer, connections: Connections) -> dict[KeyName, Key]:
    """The keys of an issuer that are for signatures. Blocks, until `connections` end at most.

    Where there is one alone, it is that of no ID, too, since a token need not name it: an ID is
    optional (RFC 7517, section 4.5), and so is the algorithm (section 4.4).

    Raises:
        OSError: They, or files that reading them takes, cannot be read.
        HTTPException: The answer breaks off, or is not HTTP.
        ValueError, RecursionError: What was read is not a set of keys.
    """
    context = _context(issuer)
    url = issuer.jwks_url
    if url is None:
        place = issuer.issuer.rstrip("/") + "/.well-known/openid-configuration"
        url = _read_json(issuer, place, context, connections).get("jwks_uri")
        if not isinstance(url, str) or not _is_private(url):
            raise ValueError(f"{place} has no `jwks_uri` that begins with https://")
    listed = _read_json(issuer, url, context, connections).get("keys")
    found = [*_usable(listed if isinstance(listed, list) else [])]
    keys: dict[KeyName, Key] = {name: key for name, key in found if name[0] is not None}
    if len(found) == 1:
        (_, key_type), key = found[0]
        keys[None, key_type] = key
    if not keys:
        raise ValueError(f"{url} has no usable key; of several, each needs an ID (`kid`)")
    return keys


def _check_files(document: Document, path: str, issuer: Issuer) -> None:
    """Raises InvalidArgument where a file that reading the keys takes cannot be read."""
    name = "ca_file"
    try:
        if issuer.ca_file is not None:
            _context(issuer)
        name = "token_file"
        _bearer(issuer)
    except OSError as error:
        raise document.error(f"{path}.{name}", str(error)) from error


def _context(issuer: Issuer) -> ssl.SSLContext:
    """Trusts what its server's certificate must be signed by; raises OSError, with the file."""
    try:
        context = ssl.create_default_context(cafile=issuer.ca_file)
    except ssl.SSLError as error:
        raise OSError(f"{issuer.ca_file} has no certificate that can be read") from error
    except OSError as error:
        raise OSError(f"cannot read {issuer.ca_file}: {error.strerror}") from error
    # Set from Python 3.13 on: it refuses certificates without an authority key identifier, as some
    # API servers of Kubernetes have them.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _bearer(issuer: Issuer) -> str | None:
    """The token that reading its keys needs; None: none. Raises OSError, with the file."""
    if issuer.token_file is None:
        return None
    try:
        return Path(issuer.token_file).read_text(encoding="ascii").strip()
    except UnicodeDecodeError as error:
        raise OSError(f"{issuer.token_file} has no token") from error
    except OSError as error:
        raise OSError(f"cannot read {issuer.token_file}: {error.strerror}") from error


def _usable(listed: Sequence[object]) -> Iterator[tuple[KeyName, Key]]:
    """Those of keys as in RFC 7517 that are for signatures, with their names."""
    for fields in listed:
        if not isinstance(fields, dict):
            continue
        if "d" in fields:
            log.warning("passing over a private key: all who read it there can sign tokens")
            continue
        try:
            key = jwt.PyJWK(fields)
        except (jwt.PyJWTError, TypeError, LookupError, NotImplementedError):
            continue  # It is damaged, or of a kind that is not supported.
        if key.key_type == "oct" or key.public_key_use not in (None, "sig"):
            continue
        if isinstance(key.key, RSAPublicKey) and key.key.key_size < RSA_BITS_MIN:
            log.warning("passing over a key of RSA with fewer than %d bits", RSA_BITS_MIN)
            continue
        is_for_all = isinstance(key.key, RSAPublicKey) and not fields.get("alg")
        key_id = fields.get("kid")
        name = (key_id if isinstance(key_id, str) else None, fields["kty"])
        yield name, key.key if is_for_all else key


def _read_json(
    issuer: Issuer, url: str, context: ssl.SSLContext, connections: Connections
) -> dict[str, Any]:
    request = urllib.request.Request(url, headers={"Accept": "application/json"})
    if (token := _bearer(issuer)) is not None:
        # Not sent on to where the answer redirects.
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    proxies = urllib.request.getproxies()
    proxies.pop("http", None)  # Without TLS there is this machine alone: nothing else may read it.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler(proxies), *connections.handlers(context), _PrivateRedirects
    )
    with opener.open(request, timeout=FETCH_TIMEOUT_S) as answer:
        data = answer.read(KEYS_BYTES_MAX + 1)
    if len(data) > KEYS_BYTES_MAX:
        raise ValueError(f"{url} has more than {KEYS_BYTES_MAX} bytes")
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError(f"{url} is not a JSON object")
    return value


class _PrivateRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if not _is_private(newurl):
            raise ValueError(f"{req.full_url} redirects to {newurl}, which is not https://")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _is_private(url: str) -> bool:
    """Whether its responses cannot be read or changed on the way."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:  # as for https://[
        return False
    if parts.scheme == "http":
        return parts.hostname in ("127.0.0.1", "::1", "localhost")
    return parts.scheme == "https"  # and none of files, which urllib would read as well


def _principal(issuer: Issuer, claims: dict[str, Any]) -> Principal:
    name = claims[issuer.principal_claim]
    if not _is_text(name) or not 0 < len(name) <= NAME_LENGTH_MAX or not name.isprintable():
        raise _refused(f"has no usable claim `{issuer.principal_claim}`")
    attributes: dict[str, str | list[str]] = {}
    for claim in issuer.attributes:
        value = claims.get(claim)
        if _is_text(value):
            attributes[claim] = value
        elif isinstance(value, list):
            attributes[claim] = [part for part in value if _is_text(part)]
    # The signature is good until then by the issuer's clock; ours may be behind.
    expires_at_s = float(claims["exp"]) + issuer.clock_skew_s
    return Principal(issuer.principal_prefix + name, "jwt", attributes, expires_at_s)


def _is_text(value: object) -> TypeGuard[str]:
    """Whether gRPC can send it: JSON can have halves of characters, which UTF-8 does not have."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refused(problem: str) -> Unauthenticated:
    return Unauthenticated(f"the token {problem}", reason="TOKEN_REFUSED")
