"""Files that are read again when they have changed."""

import errno
import os
from pathlib import Path

import pytest

from slatemq._file_status import LoadedFiles
from slatemq.errors import InvalidArgument


def test_a_file_that_was_replaced_by_one_without_rights_is_read_once_it_has_them(
    tmp_path: Path,
) -> None:
    key = tmp_path / "key"

    def read() -> str:
        if not key.stat().st_mode & 0o400:  # for tests that run as root, too
            raise InvalidArgument("key", "cannot be read")
        return key.read_text()

    key.write_text("old")
    loaded = LoadedFiles(read, key)
    renewed = tmp_path / "renewed"
    renewed.write_text("new")
    renewed.chmod(0)
    renewed.rename(key)
    with pytest.raises(InvalidArgument):
        loaded.reload()
    assert (loaded.reload(), loaded.value) == (False, "old")

    before_ns = key.stat().st_ctime_ns
    while key.stat().st_ctime_ns == before_ns:  # the clock of files may stand still for 10 ms
        key.chmod(0o400)

    assert (loaded.reload(), loaded.value) == (True, "new")


def test_a_file_that_cannot_be_read_for_a_moment_is_read_at_the_next_look(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    failures: list[OSError] = []

    def read() -> str:
        try:
            if failures:
                raise failures.pop()
            text = tokens.read_text()
        except OSError as error:
            raise InvalidArgument("tokens", f"cannot read it: {error.strerror}") from error
        if not text:
            raise InvalidArgument("tokens", "is empty")
        return text

    tokens.write_text("one and two")
    loaded = LoadedFiles(read, tokens)

    # Given one token less, of which the first two looks see nothing
    tokens.write_text("one")
    failures += [OSError(errno.EIO, "broken"), OSError(errno.EIO, "broken")]
    with pytest.raises(InvalidArgument, match="broken"):
        loaded.reload()
    assert (loaded.reload(), loaded.value) == (False, "one and two")  # It is said once.

    # Then the next one does, although the file has not changed since
    assert (loaded.reload(), loaded.value) == (True, "one")

    # And what is read and wrong is not read again until it changes
    tokens.write_text("")
    with pytest.raises(InvalidArgument, match="empty"):
        loaded.reload()
    failures.append(OSError(errno.EIO, "broken"))
    assert (loaded.reload(), loaded.value) == (False, "one")
    assert failures


def test_the_problem_of_a_file_that_was_away_ends_once_it_is_back(tmp_path: Path) -> None:
    tokens, elsewhere = tmp_path / "tokens", tmp_path / "elsewhere"

    def read() -> str:
        try:
            return tokens.read_text()
        except OSError as error:
            raise InvalidArgument("tokens", f"cannot read it: {error.strerror}") from error

    tokens.write_text("one")
    os.link(tokens, elsewhere)
    loaded = LoadedFiles(read, tokens, elsewhere)
    tokens.unlink()
    with pytest.raises(InvalidArgument):
        loaded.reload()
    assert "cannot read it" in loaded.problem

    os.link(elsewhere, tokens)
    loaded.reload()

    assert (loaded.problem, loaded.value) == ("", "one")


def test_what_is_not_good_yet_is_taken_when_its_time_has_come(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cert = tmp_path / "cert"
    now = 1

    def check(value: str) -> None:
        if int(value) > now:
            raise InvalidArgument("cert", "is not valid yet")

    # At first there is nothing better
    cert.write_text("2")
    assert LoadedFiles(cert.read_text, cert, check=check).value == "2"
    assert "is not valid yet" in caplog.text

    # Later there is
    cert.write_text("1")
    loaded = LoadedFiles(cert.read_text, cert, check=check)
    cert.write_text("20")
    with pytest.raises(InvalidArgument, match="is not valid yet"):
        loaded.reload()
    assert (loaded.reload(), loaded.value) == (False, "1")  # It is said once.
    assert loaded.problem

    now = 20
    assert (loaded.reload(), loaded.value, loaded.problem) == (True, "20", "")
    assert not loaded.reload()
