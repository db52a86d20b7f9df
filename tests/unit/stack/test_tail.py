from pathlib import Path

from services.stack.process import last_line


def test_the_last_line_is_the_last_that_says_something(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("first\nlast words\n\n")

    assert last_line(log) == "last words"


def test_what_an_earlier_life_said_does_not_count(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("earlier\n")

    assert last_line(log, since_bytes=log.stat().st_size) == ""


def test_no_log_says_nothing(tmp_path: Path) -> None:
    assert last_line(None) == last_line(tmp_path / "none.log") == ""
