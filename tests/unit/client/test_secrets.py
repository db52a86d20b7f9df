"""Secrets: what is left out of texts, and files that others can read."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from libs.serving.process.logs import JsonLines, TextLines
from libs.storage.database.addresses import parse_root
from slatemq._secrets import read_secret, redacted
from slatemq.credentials import Credentials


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
        "authorization: Bearer SECRET",
        "authorization=Bearer%20SECRET",
        r"Authorization: Basic SECRET==\x01",
        "'authorization': 'Basic SECRET'",
        "authorization=Basic%20SECRET",
        "the token smq_abc23_SECRET is unknown",
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
        "the basic settings of authorization are basic",
    ],
)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert redacted(text) == text


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
