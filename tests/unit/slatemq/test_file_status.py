"""Files that are read again when they have changed."""

import errno
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
