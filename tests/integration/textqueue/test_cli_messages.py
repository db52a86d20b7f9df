"""What `slatemq tq` tells those who go wrong, and those who ask."""

import subprocess
from pathlib import Path

import pytest

from tests.integration.textqueue.terminal import CONTENT, Terminal


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    return Terminal(capfd, monkeypatch)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("jobs.tq").write_text(CONTENT)
    return Path("jobs.tq")


@pytest.mark.parametrize("command", ["ls", "next", "check", "compact"])
def test_a_byte_order_mark_is_reported_and_how_to_get_rid_of_it(
    run: Terminal, file: Path, command: str
) -> None:
    file.write_bytes(b"\xef\xbb\xbf-first\n-second\n")

    run(command, "jobs.tq")

    assert run.err.count("slatemq: jobs.tq:1: a byte order mark (BOM)") == 1
    assert "unknown control" not in run.err
    # And the advice helps
    advice = run.err.partition("remove the mark: ")[2]
    subprocess.run(advice, shell=True, check=True)
    assert file.read_bytes() == b"-first\n-second\n"
    run(command, "jobs.tq")
    assert run.err == ""


def test_a_byte_order_mark_is_reported_of_stdin_and_where_it_keeps_from_marking(
    run: Terminal, file: Path
) -> None:
    content = b"\xef\xbb\xbf-first\n-second\n"
    file.write_bytes(content)

    assert run("ls", "-", stdin=content) == "10\tqueued\tsecond\n"
    assert run.err.startswith("slatemq: stdin:1: a byte order mark (BOM)")
    run("done", "jobs.tq", "0", code=1)
    assert "is not a message but of an unknown kind: it begins with a byte order mark" in run.err
    run("ls", "jobs.tq", "--strict", code=2)
    assert "unknown control character '\\ufeff': a byte order mark" in run.err
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    "command", ["", "ls", "next", "append", "done", "fail", "release", "set", "check", "compact"]
)
def test_the_help_has_examples(run: Terminal, command: str) -> None:
    result = run(*command.split(), "--help")

    assert result.count(f"  slatemq tq {command}") >= 2
    assert max(map(len, result.splitlines())) <= 80


def test_what_is_not_there_is_reported_by_its_name_and_with_what_there_is(
    run: Terminal, file: Path
) -> None:
    for words in (("ls",), ("next", "--claim"), ("done", "0"), ("compact",), ("check",)):
        run(words[0], "nowhere.tq", *words[1:], code=2)
        assert run.err == "slatemq: nowhere.tq: No such file or directory\n"
    run("set", "jobs.tq", str(CONTENT.index("-photo 7")), "eror", "x", code=1)
    assert "the entry has no variable 'eror': it has 'retries', 'error'" in run.err
    run("set", "jobs.tq", str(CONTENT.index("-photo 8")), "error", "x", code=1)
    assert "the entry has no variable 'error': it has none" in run.err
