import io
import logging
from pathlib import Path

import pytest

from libs.serving.process import logs
from libs.serving.process.exits import ExitCause
from services.stack.process import words_of


def test_the_words_are_the_last_line_that_says_something(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("first\nlast words\n\n")

    assert words_of(log) == "last words"


def test_what_an_earlier_life_said_does_not_count(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("earlier\n")

    assert words_of(log, since_bytes=log.stat().st_size) == ""


def test_no_log_says_nothing(tmp_path: Path) -> None:
    assert words_of(None) == words_of(tmp_path / "none.log") == ""


@pytest.mark.parametrize("form", ["text", "json"])
def test_why_a_process_ended_is_found_whatever_is_logged_around_it(
    tmp_path: Path, form: str
) -> None:
    # Given a refusal of two lines, with errors and the stacks of others before and behind it
    reason = "tokens.yaml is not YAML\nand policy.yaml is not, either"

    written = _logged(form, reason)

    log = tmp_path / "a.log"
    log.write_text(f"{written}E0000 00:00:01.0 42 log.cc:1] a library's own line\n")
    words = words_of(log)
    first, *others = words.split("\n")
    assert f"wrong_setting: {reason}" in words.replace("\\n", "\n")
    assert first.startswith(("20", '{"'))
    assert first.endswith(("tokens.yaml is not YAML", "}"))
    assert len(others) == (1 if form == "text" else 0)


def test_a_killed_process_did_not_end_for_the_reason_of_another(tmp_path: Path) -> None:
    # Given one that was fenced when this one took its data, and logged so beside it
    log = tmp_path / "a.log"
    log.write_text(_logged("text", "of another") + "2026-11-29T20:00:00.000Z INFO serving\n")

    assert "wrong_setting: of another" in words_of(log)
    assert words_of(log, was_killed=True) == "2026-11-29T20:00:00.000Z INFO serving"


def _logged(form: str, reason: str) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter((logs.TextLines if form == "text" else logs.JsonLines)("ingest"))
    logger = logging.Logger("around")
    logger.addHandler(handler)
    _fail(logger)
    ExitCause.usage(reason).log(logger)
    _fail(logger)
    return stream.getvalue()


def _fail(logger: logging.Logger) -> None:
    try:
        raise ValueError("of another")
    except ValueError:
        logger.exception("another error")
