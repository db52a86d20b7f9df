"""Signatures of webhooks: the vector of the standard, and whatever is wrong refused."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.events.signatures import (
    ID,
    SIGNATURE,
    TIMESTAMP,
    WrongSignature,
    make_secret,
    sign,
    verify,
)

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
MESSAGE_ID = "msg_p5jXN8AQM9LWM0D4loKWxJek"
BODY = b'{"test": 2432232314}'
NOW = 1_614_265_330.0


def test_the_vector_of_the_standard_is_signed_and_verified() -> None:
    headers = sign(SECRET, MESSAGE_ID, BODY, NOW)

    assert headers == {
        ID: MESSAGE_ID,
        TIMESTAMP: "1614265330",
        SIGNATURE: "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }
    assert verify([SECRET], headers, BODY, NOW + 299) == MESSAGE_ID


def test_a_secret_is_changed_with_both_known_at_either_end() -> None:
    new = make_secret()
    headers = sign(new, MESSAGE_ID, BODY, NOW)
    both = headers | {
        SIGNATURE: f"{sign(SECRET, MESSAGE_ID, BODY, NOW)[SIGNATURE]} {headers[SIGNATURE]}"
    }

    assert verify([SECRET, new], headers, BODY, NOW) == MESSAGE_ID
    assert verify([new], both, BODY, NOW) == MESSAGE_ID


@pytest.mark.parametrize(
    ("changed", "body", "now", "words"),
    [
        ({}, BODY + b" ", NOW, "fits the body"),
        ({ID: "msg_other"}, BODY, NOW, "fits the body"),
        ({TIMESTAMP: "1614265331"}, BODY, NOW, "fits the body"),
        ({SIGNATURE: "v1,"}, BODY, NOW, "fits the body"),
        ({SIGNATURE: "v1,ü"}, BODY, NOW, "fits the body"),
        ({SIGNATURE: "v1,\udcff"}, BODY, NOW, "missing or wrong"),
        ({ID: "msg\udcff"}, BODY, NOW, "missing or wrong"),
        ({TIMESTAMP: "\udcff"}, BODY, NOW, "missing or wrong"),
        ({TIMESTAMP: "9" * 400}, BODY, NOW, "missing or wrong"),
        ({TIMESTAMP: "9" * 5_000}, BODY, NOW, "missing or wrong"),
        ({TIMESTAMP: "soon"}, BODY, NOW, "missing or wrong"),
        ({}, BODY, NOW + 301, "not from now"),
        ({}, BODY, NOW - 301, "not from now"),
    ],
)
def test_whatever_is_wrong_is_refused(
    changed: dict[str, str], body: bytes, now: float, words: str
) -> None:
    headers = sign(SECRET, MESSAGE_ID, BODY, NOW) | changed

    with pytest.raises(WrongSignature, match=words):
        verify([SECRET], headers, body, now)


PAGE = Path(__file__).resolve().parents[3] / "docs/how-to/event-uses.md"


@pytest.fixture(scope="module")
def is_signed() -> Callable[[str, dict[str, str], bytes], bool]:
    """The function of the page."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (block,) = [one for one in blocks if "def is_signed" in one]
    names: dict[str, Any] = {}
    exec(block, names)
    function: Callable[[str, dict[str, str], bytes], bool] = names["is_signed"]
    return function


def test_the_function_of_the_page_takes_what_is_signed_now(
    is_signed: Callable[[str, dict[str, str], bytes], bool],
) -> None:
    headers = sign(SECRET, MESSAGE_ID, BODY)
    assert is_signed(SECRET, headers, BODY)
    assert not is_signed(SECRET, headers, BODY + b" ")
    assert not is_signed(SECRET, sign(SECRET, MESSAGE_ID, BODY, NOW), BODY)


@pytest.mark.parametrize("name", [ID, TIMESTAMP, SIGNATURE])
@pytest.mark.parametrize("value", [None, "", "\udcff", "ü", "9" * 400, "9" * 5_000])
def test_the_function_of_the_page_refuses_any_other_header(
    is_signed: Callable[[str, dict[str, str], bytes], bool], name: str, value: str | None
) -> None:
    headers = sign(SECRET, MESSAGE_ID, BODY)
    del headers[name]
    assert not is_signed(SECRET, headers | ({} if value is None else {name: value}), BODY)


def test_a_request_without_a_signature_and_one_of_another_secret_are_refused() -> None:
    with pytest.raises(WrongSignature, match="missing"):
        verify([SECRET], {}, BODY, NOW)
    with pytest.raises(WrongSignature, match="fits the body"):
        verify([SECRET], sign(make_secret(), MESSAGE_ID, BODY, NOW), BODY, NOW)


def test_a_text_that_is_no_secret_is_named() -> None:
    with pytest.raises(ValueError, match="base64"):
        sign("whsec_?", MESSAGE_ID, BODY)
