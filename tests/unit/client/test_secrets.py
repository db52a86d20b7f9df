"""Secrets: what is left out of texts, and files that others can read."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from libs.serving.process.logs import JsonLines, TextLines
from libs.storage.database.addresses import parse_root
from slatemq._rpc.endpoints import addresses_of
from slatemq._secrets import read_secret, redacted
from slatemq.credentials import Credentials, TokenSource
from slatemq.errors import InvalidArgument


@pytest.mark.parametrize(
    "text",
    [
        "cannot reach redis://:SECRET@127.0.0.1:6379/0",
        "cannot reach 'amqp://user:SECRET@host'",
        "GET https://b.example/x?X-Amz-Signature=SECRET&y=1: 403",
        "cannot reach redis://:p@SECRET@127.0.0.1:6379/0",
        "cannot reach redis://:p&SECRET@127.0.0.1:6379/0",
        "PUT https://a.example/c?sv=1&sig=SECRET%2F&se=2: 403",
        "AccountName=a;AccountKey=SECRET==;EndpointSuffix=x",
        "the token eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ4In0.SECRET is unknown",
        "the token x-eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ4In0.SECRET is unknown",
        "POST /?token-of.token=SECRET",
        "authorization: Bearer SECRET",
        "authorization=Bearer%20SECRET",
        r"Authorization: Basic SECRET==\x01",
        "'authorization': 'Basic SECRET'",
        "authorization=Basic%20SECRET",
        "the token smq_abc23_SECRET-x_4yz0987654321 is unknown",
        "GET http://key:it's-SECRET@127.0.0.1:1/b",
        "cannot reach redis://:p/SECRET@127.0.0.1:6379/0",
        "cannot reach redis://user:/SECRET@host",
        "cannot reach redis://user:12/SECRET@host",
        "cannot reach redis://:pa ss-SECRET@host",
        "cannot reach redis://user:12 SECRET@host",
        "cannot reach redis://user:12 p@SECRET@host:6379/0",
        "cannot reach redis://user:123456 and SECRET@host",
        'url="amqp://user:a"SECRET@host"',
        "url='amqp://user:a'b c/d:SECRET@host'",
        "amqp://user:a@b/SECRET@host is down",
        "amqp://it's-SECRET@host is down",
        "first\nredis://:a b SECRET@host",
        'cannot open {"private_key": "-----BEGIN RSA PRIVATE KEY-----\nSECRET\n", "id": "x"}',
    ],
)
def test_a_text_is_shown_without_its_secret(text: str) -> None:
    assert "SECRET" not in redacted(text)
    assert "***" in redacted(text)


@pytest.mark.parametrize(
    "text",
    [
        "file:///data/a@b",
        "ask a@b.example",
        "http://host/path?shard=1&design=2",
        "listening on [::1]",
        "http://h:1/0 a@b",
        "http://h:80, a@b",
        "http://h:80 refused a@b",
        "amqp://h:5672 is closed by rabbit@node-1",
        "http://[::1]:80 a@b",
        "https://h: refused by a@b",
        "http://h/x:y a@b",
        "the basic settings of authorization are basic",
        "purged smq_orders_eu",
    ],
)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize(
    "text", ["eyJ-" * 1_000_000, "?" + "token" * 1_000_000, "?token=" + "eyJ-a." * 1_000_000 + "?"]
)
def test_no_part_of_a_text_is_read_over_and_over(text: str) -> None:
    """It would take hours."""
    assert len(redacted(text)) <= len(text)


def test_a_text_of_two_urls_keeps_what_is_between_them() -> None:
    text = "GET http://k:SECRET@h:1/b took 1 s - sending failed for url (http://k:SECRET@h:1/b)"

    assert redacted(text) == text.replace("k:SECRET", "***")


@pytest.mark.parametrize("lines", [TextLines("broker"), JsonLines("broker")])
def test_facts_of_a_line_stay_apart_where_one_has_a_login(lines: logging.Formatter) -> None:
    record = logging.LogRecord("x", logging.ERROR, "", 0, "down: %s", ('amqp://u:a"b@h',), None)
    record.url, record.between, record.mail = "amqp://u:a b@h", 7, "a@b"

    line = lines.format(record)

    assert "down: amqp://***@h" in line
    if isinstance(lines, JsonLines):
        facts = json.loads(line)
        assert (facts["url"], facts["between"], facts["mail"]) == ("amqp://***@h", 7, "a@b")
    else:
        assert line.endswith(" url=amqp://***@h between=7 mail=a@b")


@pytest.mark.parametrize("lines", [TextLines("broker"), JsonLines("broker")])
def test_no_log_line_has_a_secret_not_even_in_its_traceback(lines: logging.Formatter) -> None:
    try:
        raise OSError("redis://:SECRET@host is down")
    except OSError as error:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "%s", (error,), None)
        record.exc_info = (type(error), error, error.__traceback__)
        record.url = "amqp://user:SECRET@host"

    assert "SECRET" not in lines.format(record)


@pytest.mark.parametrize(
    "url", ["s3://key:SECRET@bucket", "s3://bucket?endpoint=http://key:SECRET@127.0.0.1:5000"]
)
def test_a_root_takes_no_login_and_does_not_repeat_it(url: str) -> None:
    with pytest.raises(ValueError, match="belong in the environment") as caught:
        parse_root(url)

    assert "SECRET" not in str(caught.value)


def test_a_file_that_all_users_can_read_is_warned_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "token"
    file.write_text("SECRET")
    file.chmod(0o600)
    assert read_secret(file) == b"SECRET"
    assert not caplog.records

    file.chmod(0o644)
    read_secret(file)
    read_secret(file)

    (record,) = caplog.records
    assert str(file) in record.getMessage()
    assert "SECRET" not in caplog.text


def test_no_advice_is_given_about_the_rights_of_a_folder_in_place_of_a_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o755)

    with pytest.raises(IsADirectoryError):
        read_secret(tmp_path)

    assert not caplog.records


@pytest.mark.parametrize(("part", "warnings"), [("token", 1), ("token_file", 0)])
def test_profiles_that_all_users_can_read_are_warned_about_if_one_has_a_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, part: str, warnings: int
) -> None:
    file = tmp_path / "profiles.toml"
    file.write_text(f'[default]\nca = "ca.crt"\n[other]\n{part} = "SECRET"\n')
    file.chmod(0o644)

    Credentials.load(environ={"SLATEMQ_PROFILES": str(file)})

    assert [str(file) in text for text in caplog.messages] == [True] * warnings
    assert "SECRET" not in caplog.text


def test_a_secret_in_place_of_a_file_or_an_address_is_not_repeated() -> None:
    token = "smq_abc23_SECRET-x_4yz0987654321"
    with pytest.raises(InvalidArgument, match="cannot read") as unread:
        TokenSource(Credentials(token_file=token))
    assert "SECRET" not in str(unread.value)
    with pytest.raises(InvalidArgument, match="no user and no password") as named:
        addresses_of("ops:SECRET@127.0.0.1:7420")
    assert "SECRET" not in str(named.value)
