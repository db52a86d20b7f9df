"""JSON Web Tokens, good and bad, and the keys of their issuers."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from libs.access import jwt_tokens
from libs.access.authentication import Authenticator
from libs.access.jwt_tokens import JwtTokens
from libs.access.principals import Principal
from libs.documents import Document
from slatemq.cli.access.dev_certificates import Authority
from slatemq.errors import InvalidArgument, ResourceExhausted, Unauthenticated, Unavailable
from tests.integration.waiting import WAIT_SECONDS, eventually
from tests.unit.access.access_files import Files, bearer


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


AUDIENCE = "slatemq"


@cache
def private_key(owner: str, key_id: str) -> rsa.RSAPrivateKey:
    """The same in all tests: making one takes long."""
    return rsa.generate_private_key(public_exponent=65_537, key_size=2048)


@dataclass
class KeyServer:
    """An issuer: its keys over HTTP."""

    url: str
    owner: str = "issuer"
    private: dict[str, rsa.RSAPrivateKey] = field(default_factory=dict)
    published: dict[str, Any] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    is_down: bool = False
    is_other_server: bool = False
    moved_to: str = ""
    keys_url: str = ""
    """Where its keys are, as it says; empty: here."""
    answers: threading.Event = field(default_factory=threading.Event)
    """Set: it answers, or else it hangs."""
    dribbles: str = ""
    """What it sends a byte at a time, without end: `header` or `body`; empty: nothing."""

    def __post_init__(self) -> None:
        self.answers.set()

    def add(self, key_id: str) -> None:
        key = self.private[key_id] = private_key(self.owner, key_id)
        numbers = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key()))
        self.published[key_id] = numbers | {"kid": key_id, "use": "sig", "alg": "RS256"}

    def sign(
        self, key_id: str = "one", *, headers: Any = None, algorithm: str = "RS256", **claims: Any
    ) -> str:
        now = time.time()
        whole = {"iss": self.url, "aud": AUDIENCE, "sub": "pod-1", "exp": now + 600, "iat": now}
        whole |= claims
        head = {"kid": key_id} | (headers or {})
        whole, head = (
            {name: value for name, value in one.items() if value is not None}
            for one in (whole, head)
        )
        return jwt.encode(whole, self.private[key_id], algorithm, headers=head)


@pytest.fixture
def issuer(monkeypatch: pytest.MonkeyPatch) -> Iterator[KeyServer]:
    for name in ("FETCH_TIMEOUT_S", "FETCH_S_MAX"):
        monkeypatch.setattr(jwt_tokens, name, 3_600.0)
    served: KeyServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.requests.append(self.path)
            served.answers.wait()
            if served.dribbles:
                self.dribble(b"HTTP/1.1 200 OK\r\n" + b"\r\n" * (served.dribbles == "body"))
                return
            if served.is_other_server:
                self.wfile.write(b"220 mail\r\n\r\n")
                return
            if served.is_down:
                self.send_error(503)
                return
            if served.moved_to and self.path == "/keys":
                self.send_response(302)
                self.send_header("Location", served.moved_to)
                self.end_headers()
                return
            body = (
                {"jwks_uri": served.keys_url or f"{served.url}/keys"}
                if self.path.startswith("/.well-known/")
                else {"keys": list(served.published.values())}
            )
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def dribble(self, data: bytes) -> None:
            with suppress(OSError):  # The client has gone.
                while served.dribbles:
                    self.wfile.write(data)
                    data = b" "
                    time.sleep(0.01)

        def log_message(self, *_: object) -> None:
            """Tests have no log of it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = KeyServer(f"http://127.0.0.1:{server.server_port}")
    served.add("one")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield served
    served.answers.set()
    served.dribbles = ""
    server.shutdown()
    thread.join()
    server.server_close()


def accepting(files: Files, issuer: KeyServer, **settings: Any) -> Authenticator[Principal]:
    entry = {"issuer": issuer.url, "audience": AUDIENCE} | settings
    files.issuers.write_text(yaml.safe_dump({"issuers": [entry]}))
    return files.authenticator(tokens=False, issuers=True)


async def test_a_signed_token_proves_its_subject(files: Files, issuer: KeyServer) -> None:
    authenticator = accepting(
        files, issuer, principal_prefix="k8s:", attributes=["tenant", "groups", "absent"]
    )

    proof = await authenticator.prove(
        bearer(issuer.sign(tenant="a", groups=["x", 3, "y"], aud=["other", AUDIENCE]))
    )
    principal = proof.made

    assert (principal.name, principal.method) == ("k8s:pod-1", "jwt")
    assert principal.attributes == {"tenant": "a", "groups": ["x", "y"]}
    assert issuer.requests == ["/.well-known/openid-configuration", "/keys"]


@pytest.mark.parametrize("algorithm", ["RS256", "RS512", "PS256"])
async def test_a_key_that_states_no_algorithm_is_for_all_that_its_issuer_may_use(
    files: Files, issuer: KeyServer, algorithm: str
) -> None:
    authenticator = accepting(files, issuer, algorithms=["RS512", "PS256"])
    del issuer.published["one"]["alg"]
    token = issuer.sign(algorithm=algorithm)

    if algorithm == "RS256":
        with pytest.raises(Unauthenticated, match="is not valid"):
            await authenticator.prove(bearer(token))
    else:
        assert (await authenticator.prove(bearer(token))).made.name == "pod-1"


async def test_a_key_that_states_its_algorithm_is_for_no_other_one(
    files: Files, issuer: KeyServer
) -> None:
    authenticator = accepting(files, issuer, algorithms=["RS256", "RS512"])

    with pytest.raises(Unauthenticated, match="is not valid"):
        await authenticator.prove(bearer(issuer.sign(algorithm="RS512")))


@pytest.mark.parametrize("headers", [{"kid": None}, {"kid": "any"}])
async def test_the_only_key_of_an_issuer_needs_no_id(
    files: Files, issuer: KeyServer, headers: Any
) -> None:
    authenticator = accepting(files, issuer)
    del issuer.published["one"]["kid"]

    proof = await authenticator.prove(bearer(issuer.sign(headers=headers)))

    assert proof.made.name == "pod-1"
    with pytest.raises(Unauthenticated, match="is not valid"):
        await authenticator.prove(bearer(by_another_key(issuer)))


async def test_a_token_need_not_name_the_only_key(files: Files, issuer: KeyServer) -> None:
    authenticator = accepting(files, issuer)

    token = issuer.sign(headers={"kid": None})
    assert (await authenticator.prove(bearer(token))).made.name == "pod-1"

    issuer.add("two")
    again = accepting(files, issuer)
    with pytest.raises(Unauthenticated, match="signed with a key that its issuer does not have"):
        await again.prove(bearer(token))


async def test_several_keys_without_an_id_are_none(
    files: Files, issuer: KeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    authenticator = accepting(files, issuer)
    issuer.add("two")
    for key in issuer.published.values():
        del key["kid"]

    with pytest.raises(Unavailable, match="keys"):
        await authenticator.prove(bearer(issuer.sign()))

    assert "needs an ID" in str(vars(caplog.records[-1]))


def unsigned(issuer: KeyServer, **claims: Any) -> str:
    parts = (
        {"alg": "none", "kid": "one"},
        {"iss": issuer.url, "aud": AUDIENCE, "sub": "root", "exp": time.time() + 600, **claims},
    )
    texts = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts]
    return b".".join([*texts, b""]).decode()


def signed_with_the_public_key(issuer: KeyServer) -> str:
    """HS256 with the published key as the secret: the usual confusion of algorithms."""
    public = (
        issuer.private["one"]
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    claims = {"iss": issuer.url, "aud": AUDIENCE, "sub": "root", "exp": time.time() + 600}
    head, body, _ = jwt.encode(claims, "x" * 32, "HS256", headers={"kid": "one"}).split(".")
    signature = hmac.digest(public, f"{head}.{body}".encode(), "sha256")
    return f"{head}.{body}." + base64.urlsafe_b64encode(signature).rstrip(b"=").decode()


def by_another_key(issuer: KeyServer) -> str:
    other = KeyServer(issuer.url, "forger")
    other.add("one")
    return other.sign()


FORGED: dict[str, Callable[[KeyServer], str]] = {
    "expired": lambda issuer: issuer.sign(exp=time.time() - 31),
    "not yet": lambda issuer: issuer.sign(nbf=time.time() + 300),
    "no expiry": lambda issuer: issuer.sign(exp=None),
    "wrong audience": lambda issuer: issuer.sign(aud="other"),
    "no audience": lambda issuer: issuer.sign(aud=None),
    "unknown issuer": lambda issuer: issuer.sign(iss="http://127.0.0.1:1"),
    "list as issuer": lambda issuer: unsigned(issuer, iss=[issuer.url]),
    "no subject": lambda issuer: issuer.sign(sub=None),
    "empty subject": lambda issuer: issuer.sign(sub=""),
    "endless expiry": lambda issuer: issuer.sign(exp=10**400),
    "half a character as subject": lambda issuer: issuer.sign(sub="\ud800"),
    "commands of a terminal as subject": lambda issuer: issuer.sign(sub="pod\x1b[2J"),
    "long subject": lambda issuer: issuer.sign(sub="x" * 256),
    "unknown key": lambda issuer: issuer.sign(headers={"kid": "other"}),
    "odd key": lambda issuer: issuer.sign(headers={"kid": ""}),
    "alg none": unsigned,
    "alg confusion": signed_with_the_public_key,
    "other key": by_another_key,
    "other signature": lambda issuer: issuer.sign()[:-6] + "AAAAAA",
    "no token": lambda issuer: "a.b.c",
    "oversized": lambda issuer: issuer.sign(junk="x" * 20_000),
}


@pytest.mark.parametrize("form", FORGED)
async def test_a_bad_signed_token_is_refused(files: Files, issuer: KeyServer, form: str) -> None:
    authenticator = accepting(files, issuer)

    with pytest.raises(Unauthenticated):
        await authenticator.prove(bearer(FORGED[form](issuer)))

    assert (await authenticator.prove(bearer(issuer.sign()))).made.name == "pod-1"


async def test_a_new_key_is_fetched_and_a_withdrawn_one_ends(
    files: Files, issuer: KeyServer
) -> None:
    authenticator = accepting(files, issuer)
    await authenticator.prove(bearer(issuer.sign()))

    issuer.add("two")
    del issuer.published["one"]

    assert (await authenticator.prove(bearer(issuer.sign("two")))).made.name == "pod-1"
    with pytest.raises(Unauthenticated, match="key"):
        await authenticator.prove(bearer(issuer.sign("one", sub="pod-2")))


async def test_unknown_keys_do_not_make_requests_without_end(
    files: Files, issuer: KeyServer
) -> None:
    authenticator = accepting(files, issuer)
    await authenticator.prove(bearer(issuer.sign()))
    before = len(issuer.requests)

    answers = await asyncio.gather(
        *(
            authenticator.prove(bearer(issuer.sign(headers={"kid": f"k{number}"})))
            for number in range(20)
        ),
        return_exceptions=True,
    )

    assert [type(answer) for answer in answers] == [Unauthenticated] * 20
    assert len(issuer.requests) == 2 * before


async def test_tokens_that_wait_for_unknown_keys_are_few(
    files: Files, issuer: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwt_tokens, "FETCH_AGAIN_S", 3_600.0)
    monkeypatch.setattr(jwt_tokens, "WAITING_MAX", 3)
    authenticator = accepting(files, issuer)
    await authenticator.prove(bearer(issuer.sign()))
    unknown = [bearer(issuer.sign(headers={"kid": f"k{number}"})) for number in range(4)]

    waiting = [asyncio.create_task(authenticator.prove(one)) for one in unknown[:3]]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted) as caught:
        await authenticator.prove(unknown[3])
    assert (caught.value.reason, caught.value.retry_after_ms) == ("TOKEN_CHECKS", 1000)

    # A key that is known waits for none of them, and those that end leave their places
    assert (await authenticator.prove(bearer(issuer.sign(sub="pod-2")))).made.name == "pod-2"
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    again = asyncio.create_task(authenticator.prove(unknown[3]))
    await asyncio.sleep(0)
    for task in (*waiting, again):
        assert not task.done() or task.cancelled()
        task.cancel()
    await asyncio.wait([*waiting, again])


async def test_an_issuer_that_hangs_delays_no_token_whose_key_is_known(
    files: Files, issuer: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwt_tokens, "FETCH_AGAIN_S", 0.0)
    monkeypatch.setattr(jwt_tokens, "KEYS_AGE_S_MAX", 0.0)
    authenticator = accepting(files, issuer)
    await authenticator.prove(bearer(issuer.sign()))
    issuer.answers.clear()
    requests_count = len(issuer.requests)

    async with asyncio.timeout(60):
        for name in ("pod-2", "pod-3"):
            token = bearer(issuer.sign(sub=name))
            assert (await authenticator.prove(token)).made.name == name
    assert len(issuer.requests) == requests_count + 1
    issuer.answers.set()


async def test_a_caller_that_goes_while_keys_are_fetched_leaves_the_fetch_to_others(
    files: Files, issuer: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwt_tokens, "FETCH_AGAIN_S", 0.0)
    authenticator = accepting(files, issuer)
    issuer.answers.clear()
    unknown = bearer(issuer.sign(headers={"kid": "other"}))
    first = asyncio.create_task(authenticator.prove(unknown))
    await eventually(lambda: issuer.requests)
    first.cancel()
    await asyncio.wait([first])

    good = asyncio.create_task(authenticator.prove(bearer(issuer.sign())))
    await asyncio.sleep(0)
    issuer.answers.set()

    assert (await good).made.name == "pod-1"


async def test_an_answer_that_takes_too_long_is_none(
    files: Files, issuer: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwt_tokens, "FETCH_S_MAX", 0.05)
    monkeypatch.setattr(jwt_tokens, "RETRY_S", 0.0)
    authenticator = accepting(files, issuer)
    issuer.answers.clear()

    for _ in range(3):
        with pytest.raises(Unavailable, match="keys"):
            await authenticator.prove(bearer(issuer.sign()))

    issuer.answers.set()
    monkeypatch.setattr(jwt_tokens, "FETCH_S_MAX", 3_600.0)
    assert (await authenticator.prove(bearer(issuer.sign()))).made.name == "pod-1"


@pytest.mark.parametrize("part", ["header", "body"])
async def test_an_answer_that_does_not_end_holds_up_no_later_one(
    files: Files, issuer: KeyServer, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(jwt_tokens, "FETCH_S_MAX", 0.5)
    monkeypatch.setattr(jwt_tokens, "RETRY_S", 0.0)
    authenticator = accepting(files, issuer)
    issuer.dribbles = part
    with pytest.raises(Unavailable, match="keys"):
        await authenticator.prove(bearer(issuer.sign()))
    asked_count = len(issuer.requests)

    async with asyncio.timeout(WAIT_SECONDS):
        while len(issuer.requests) == asked_count:
            with suppress(Unavailable):
                await authenticator.prove(bearer(issuer.sign()))


async def test_a_new_key_is_taken_also_right_after_a_look_for_another_one(
    files: Files, issuer: KeyServer
) -> None:
    authenticator = accepting(files, issuer)
    with pytest.raises(Unauthenticated):
        await authenticator.prove(bearer(issuer.sign(headers={"kid": "other"})))

    issuer.add("two")

    assert (await authenticator.prove(bearer(issuer.sign("two")))).made.name == "pod-1"


async def test_an_issuer_that_is_down_is_not_asked_for_each_token(
    files: Files, issuer: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwt_tokens, "RETRY_S", 3_600.0)
    authenticator = accepting(files, issuer)
    issuer.is_down = True

    for number in range(3):
        with pytest.raises(Unavailable, match="keys"):
            await authenticator.prove(bearer(issuer.sign(headers={"kid": f"k{number}"})))

    assert len(issuer.requests) == 1


async def test_a_short_key_of_rsa_signs_nothing(files: Files, issuer: KeyServer) -> None:
    short = rsa.generate_private_key(public_exponent=65_537, key_size=2040)
    numbers = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(short.public_key()))
    issuer.private["short"] = short
    issuer.published["short"] = numbers | {"kid": "short"}
    authenticator = accepting(files, issuer)

    with pytest.warns(jwt.InsecureKeyLengthWarning):
        signed = issuer.sign("short")
    with pytest.raises(Unauthenticated, match="does not have"):
        await authenticator.prove(bearer(signed))
    assert (await authenticator.prove(bearer(issuer.sign()))).made.name == "pod-1"


@pytest.mark.parametrize("state", ["is_down", "is_other_server"])
async def test_an_issuer_that_is_down_or_does_not_speak_http_is_no_refusal(
    files: Files, issuer: KeyServer, state: str
) -> None:
    authenticator = accepting(files, issuer)
    setattr(issuer, state, True)

    with pytest.raises(Unavailable, match="keys"):
        await authenticator.prove(bearer(issuer.sign()))


async def test_keys_are_followed_to_no_place_where_they_can_be_changed_on_the_way(
    files: Files, issuer: KeyServer
) -> None:
    authenticator = accepting(files, issuer)
    port = issuer.url.rpartition(":")[2]

    # By a name of this machine that does not say so
    issuer.moved_to = f"http://[::ffff:127.0.0.1]:{port}/moved"
    with pytest.raises(Unavailable, match="keys"):
        await authenticator.prove(bearer(issuer.sign()))
    assert "/moved" not in issuer.requests

    issuer.moved_to = f"{issuer.url}/moved"
    again = accepting(files, issuer)
    assert (await again.prove(bearer(issuer.sign()))).made.name == "pod-1"
    assert "/moved" in issuer.requests


@pytest.mark.parametrize("form", ["file://localhost{path}", "data://localhost/,{keys}"])
async def test_keys_are_read_by_http_alone_whatever_their_issuer_says(
    files: Files, issuer: KeyServer, tmp_path: Path, form: str
) -> None:
    keys, path = json.dumps({"keys": [*issuer.published.values()]}), tmp_path / "keys"
    path.write_text(keys)
    issuer.keys_url = form.format(path=path, keys=urllib.parse.quote(keys))

    authenticator = accepting(files, issuer)

    with pytest.raises(Unavailable, match="keys"):
        await authenticator.prove(bearer(issuer.sign()))


async def test_no_proxy_sees_how_keys_of_this_machine_are_read(
    files: Files, issuer: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)

    authenticator = accepting(files, issuer)

    assert (await authenticator.prove(bearer(issuer.sign()))).made.name == "pod-1"


async def test_known_keys_serve_while_their_issuer_is_down(
    files: Files, issuer: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwt_tokens, "FETCH_AGAIN_S", 0.0)
    monkeypatch.setattr(jwt_tokens, "KEYS_AGE_S_MAX", 0.0)
    authenticator = accepting(files, issuer)
    await authenticator.prove(bearer(issuer.sign()))

    issuer.is_down = True

    assert (await authenticator.prove(bearer(issuer.sign(sub="pod-2")))).made.name == "pod-2"


async def test_known_keys_outlast_a_change_of_the_file_while_their_issuer_is_down(
    files: Files, issuer: KeyServer
) -> None:
    authenticator = accepting(files, issuer)
    await authenticator.prove(bearer(issuer.sign()))
    issuer.is_down = True

    other = {"issuer": "https://example.com", "audience": AUDIENCE}
    changed = {"issuer": issuer.url, "audience": AUDIENCE, "principal_prefix": "k8s:"}
    files.issuers.write_text(yaml.safe_dump({"issuers": [other, changed]}))
    assert files.reload_issuers()
    authenticator.forget()

    assert (await authenticator.prove(bearer(issuer.sign()))).made.name == "k8s:pod-1"


async def test_keys_from_another_place_are_not_those_that_were_known(
    files: Files, issuer: KeyServer
) -> None:
    authenticator = accepting(files, issuer)
    await authenticator.prove(bearer(issuer.sign()))
    issuer.is_down = True

    entry = {"issuer": issuer.url, "audience": AUDIENCE, "jwks_url": f"{issuer.url}/others"}
    files.issuers.write_text(yaml.safe_dump({"issuers": [entry]}))
    assert files.reload_issuers()
    authenticator.forget()

    with pytest.raises(Unavailable, match="keys"):
        await authenticator.prove(bearer(issuer.sign()))


@pytest.mark.parametrize("odd", [["RS256"], {"RS256": 1}, 5, "RS0", None])
async def test_an_odd_key_is_passed_over_and_the_good_one_beside_it_serves(
    files: Files, issuer: KeyServer, odd: object
) -> None:
    authenticator = accepting(files, issuer)
    issuer.add("two")
    issuer.published["two"] |= {"alg": odd}
    if odd is None:
        issuer.published["two"] |= {"n": ["x"]}

    assert (await authenticator.prove(bearer(issuer.sign()))).made.name == "pod-1"
    with pytest.raises(Unauthenticated, match="key"):
        await authenticator.prove(bearer(issuer.sign("two")))


@pytest.mark.parametrize(
    "damage",
    [
        lambda key: {"kty": "oct", "alg": "HS256", "use": "sig"},
        lambda key: key | {"alg": "none"},
        lambda key: (
            key | json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(private_key("issuer", "two")))
        ),
    ],
    ids=["symmetric, without its key", "none", "private"],
)
async def test_a_key_that_is_damaged_or_private_is_passed_over(
    files: Files, issuer: KeyServer, damage: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    authenticator = accepting(files, issuer)
    issuer.add("two")
    issuer.published["two"] = damage(issuer.published["two"]) | {"kid": "two"}

    assert (await authenticator.prove(bearer(issuer.sign()))).made.name == "pod-1"
    with pytest.raises(Unauthenticated, match="key"):
        await authenticator.prove(bearer(issuer.sign("two")))


@pytest.mark.parametrize("is_first", [True, False])
async def test_keys_of_two_types_may_have_one_id(
    files: Files, issuer: KeyServer, is_first: bool
) -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    numbers = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(private.public_key()))
    of_ec = {"of EC": numbers | {"kid": "one"}}
    issuer.published = issuer.published | of_ec if is_first else of_ec | issuer.published
    claims = {"iss": issuer.url, "aud": AUDIENCE, "sub": "pod-2", "exp": time.time() + 600}
    token = jwt.encode(claims, private, "ES256", headers={"kid": "one"})
    authenticator = accepting(files, issuer)

    assert (await authenticator.prove(bearer(issuer.sign()))).made.name == "pod-1"
    assert (await authenticator.prove(bearer(token))).made.name == "pod-2"


async def test_a_key_that_may_be_new_is_no_refusal_while_its_issuer_is_down(
    files: Files, issuer: KeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwt_tokens, "RETRY_S", 0.0)
    authenticator = accepting(files, issuer)
    await authenticator.prove(bearer(issuer.sign()))

    issuer.add("two")
    issuer.is_down = True
    with pytest.raises(Unavailable, match="keys"):
        await authenticator.prove(bearer(issuer.sign("two")))

    issuer.is_down = False
    assert (await authenticator.prove(bearer(issuer.sign("two")))).made.name == "pod-1"


async def test_half_a_character_becomes_no_attribute(files: Files, issuer: KeyServer) -> None:
    authenticator = accepting(files, issuer, attributes=["tenant", "groups"])

    token = issuer.sign(tenant="\ud800", groups=["x", "\udfff"])

    assert (await authenticator.prove(bearer(token))).made.attributes == {"groups": ["x"]}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"algorithms": ["HS256"]}, "issuers[0].algorithms[0]"),
        ({"algorithms": ["none"]}, "issuers[0].algorithms[0]"),
        ({"algorithms": []}, "issuers[0].algorithms"),
        ({"issuer": "http://example.com"}, "issuers[0].issuer"),
        ({"jwks_url": "http://example.com/keys"}, "issuers[0].jwks_url"),
        ({"jwks_url": "file:///etc/passwd"}, "issuers[0].jwks_url"),
        ({"audience": []}, "issuers[0].audience"),
        ({"audience": ""}, "issuers[0].audience"),
        ({"audience": ["slatemq", ""]}, "issuers[0].audience[1]"),
        ({"clock_skew_s": 86_400}, "issuers[0].clock_skew_s"),
        ({"secret": "x"}, "issuers[0]"),
    ],
)
def test_a_bad_issuer_is_refused_with_its_key(change: dict[str, Any], field: str) -> None:
    entry = {"issuer": "https://example.com", "audience": AUDIENCE} | change

    with pytest.raises(InvalidArgument) as caught:
        JwtTokens(Document("issuers.yaml", yaml.safe_dump({"issuers": [entry]})))

    assert caught.value.field == field


@pytest.mark.parametrize("name", ["ca_file", "token_file"])
@pytest.mark.parametrize("content", [None, b"\xff no certificate"])
def test_a_bad_file_of_an_issuer_is_named_when_the_issuers_are_read(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    named = tmp_path / "named"
    if content is not None:
        named.write_bytes(content)
    entry = {"issuer": "https://example.com", "audience": AUDIENCE, name: str(named)}

    with pytest.raises(InvalidArgument) as caught:
        JwtTokens(Document("issuers.yaml", yaml.safe_dump({"issuers": [entry]})))

    assert caught.value.field == f"issuers[0].{name}"
    assert str(named) in caught.value.description


async def test_a_file_of_an_issuer_that_is_lost_later_is_named_in_the_log(
    files: Files, issuer: KeyServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authorities = tmp_path / "ca.crt"
    authorities.write_bytes(Authority(1).pem)
    authenticator = accepting(files, issuer, ca_file=str(authorities))
    authorities.unlink()

    with pytest.raises(Unavailable, match="keys"):
        await authenticator.prove(bearer(issuer.sign()))

    assert str(authorities) in str(vars(caplog.records[-1]))
