"""What is kept of a program's stderr."""

import pytest

from slatemq.cli.consume.programs import WHY_CHARACTERS, last_words


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        (b"", ""),
        (b"\n \r\n", ""),
        (b"no such customer\n", "no such customer"),
        (b"Traceback:\n  line 1\nKeyError: 'k'\n", "Traceback: | line 1 | KeyError: 'k'"),
        (b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07end\x00\x07", "red end"),
        (b"caf\xe9 closed", "caf\ufffd closed"),
        ("straße zu\n".encode(), "straße zu"),
    ],
)
def test_the_end_of_stderr_becomes_one_clean_line(stderr: bytes, words: str) -> None:
    assert last_words(stderr) == words


def test_of_long_output_the_end_is_kept() -> None:
    said = last_words(b"x" * 10_000 + b"\nthe reason\n")
    assert said.startswith("…x")
    assert said.endswith("x | the reason")
    assert len(said) == WHY_CHARACTERS + 1
