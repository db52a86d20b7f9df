"""Files that are read again when they have changed."""

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
