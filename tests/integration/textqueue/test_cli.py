"""`slatemq tq`, as people and pipelines use it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slatemq.textqueue import TextQueue
from tests.acceptance.local_stack import wait_until
from tests.integration.textqueue.terminal import CONTENT, Terminal

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    return Terminal(capfd, monkeypatch)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("jobs.tq").write_text(CONTENT)
    return Path("jobs.tq")


def test_ls_gives_a_line_for_each_queued_message(run: Terminal, file: Path) -> None:
    offset = CONTENT.index("-photo 7")

    lines = run("ls", "jobs.tq").splitlines()

    assert lines[0] == f"{offset}\tqueued\tphoto 7\\tin two\\nlines"
    assert [line.split("\t")[2] for line in lines] == ["photo 7\\tin two\\nlines", "photo 8"]
    assert run("ls", "jobs.tq", "--state", "error", "--state", "unknown").count("\n") == 2
    assert run("ls", "jobs.tq", "--state", "all").count("\n") == 6


def test_ls_json_has_all_of_an_entry(run: Terminal, file: Path) -> None:
    first, _ = run.objects("ls", "--json", "jobs.tq")

    assert first == {
        "offset": CONTENT.index("-photo 7"),
        "line": 2,
        "state": "queued",
        "control": "-",
        "text": "photo 7\tin two\nlines",
        "variables": [
            {"name": "retries", "value": "03", "reserved_bytes": 2},
            {"name": "error", "value": "", "reserved_bytes": 7},
        ],
    }


def test_next_looks_and_next_claim_takes(run: Terminal, file: Path) -> None:
    # Given a look at the next message, which changes nothing
    assert run("next", "jobs.tq", "--text") == "photo 7\tin two\nlines\n"
    assert file.read_text() == CONTENT

    # When both messages are claimed
    first, second = (run("next", "jobs.tq", "--claim").split("\t") for _ in range(2))
    assert first[0].startswith("@")
    assert second[2] == "photo 8\n"
    assert run("next", "jobs.tq", "--claim") == ""
    assert "has no unclaimed message" in run.err
    run("done", "jobs.tq", "\t".join(first), code=2)
    assert "is more than a token" in run.err
    run("next", "jobs.tq", "--claim", "--lease", "0s", code=2)
    assert "--lease" in run.err

    # Then tokens finish them, in whatever process
    run("fail", "jobs.tq", first[0], "--code", "E-7")
    run("release", "jobs.tq", second[0])
    [third] = run.objects("next", "jobs.tq", "--claim", "--json", "--lease", "1m")
    run("set", "jobs.tq", third["token"], "nothing", "x", code=1)
    run("done", "jobs.tq", third["token"])
    expected = CONTENT.replace("-photo 7", "!photo 7").replace("-photo 8", "=photo 8")
    expected = expected.replace("=03", "=02").replace("=       ", "=E-7    ")
    assert file.read_text() == expected
    assert run.objects("--json", "next", "jobs.tq") == []


@pytest.mark.parametrize("form", ["--json", "--fsync"])
def test_a_claim_whose_token_could_not_be_printed_is_given_back(file: Path, form: str) -> None:
    words = [
        sys.executable,
        "-m",
        "slatemq.cli",
        "tq",
        "next",
        str(file.absolute()),
        "--claim",
        form,
    ]
    assert_full_output_is_said(words)
    claim = TextQueue(file).claim()
    assert claim is not None
    assert claim.text == "photo 7\tin two\nlines"


@pytest.mark.parametrize("words", [["ls"], ["ls", "--json"]], ids=" ".join)
def test_an_output_that_is_full_is_said(file: Path, words: list[str]) -> None:
    command, *options = words
    assert_full_output_is_said(
        [sys.executable, "-m", "slatemq.cli", "tq", command, str(file.absolute()), *options]
    )


def assert_full_output_is_said(words: list[str]) -> None:
    """It ends with 2 and one line, whether Python writes at once or at the end."""
    for unbuffered in ("", "1"):
        environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        with Path("/dev/full").open("wb") as full:
            done = subprocess.run(
                words, stdout=full, stderr=subprocess.PIPE, cwd=REPOSITORY, env=environ
            )
        assert done.stderr == b"slatemq: input or output: No space left on device\n"
        assert done.returncode == 2


def test_append_takes_text_stdin_and_lines(run: Terminal, file: Path) -> None:
    file.unlink()

    assert run("append", "jobs.tq", "one", "--var", "n=1", "--reserve", "error=4") == "0\n"
    assert run.objects("append", "jobs.tq", "-", "--json", stdin=b"two\nlines\n") == [
        {"offset": 22}
    ]
    assert run("append", "jobs.tq", "--lines", "--fsync", stdin=b"a\n\nb") == "appended: 3\n"

    assert file.read_text() == "-one\n\\n=1\n\\error=    \n-two\n lines\n-a\n-\n-b\n"


def test_lines_before_a_broken_one_are_appended_and_counted(run: Terminal, file: Path) -> None:
    out = run("append", "new.tq", "--lines", stdin=b"a\nb\n\xff\nc\n", code=2)

    assert out == "appended: 2\n"
    assert run.err == "slatemq: line 3 of stdin is not UTF-8\n"
    assert Path("new.tq").read_text() == "-a\n-b\n"


def test_ls_and_check_read_stdin(run: Terminal, file: Path) -> None:
    for words in (["ls"], ["ls", "--state", "all", "--json"], ["check"]):
        assert run(*words, "-", stdin=CONTENT.encode()) == run(*words, "jobs.tq")
    run("ls", "-", stdin=b"\\v\n", code=2)
    assert run.err == (
        "slatemq: stdin:1:1: a variable before any entry: begin the line with - = ! or #\n"
    )


def test_lines_are_appended_as_they_come_and_counted_at_ctrl_c(file: Path) -> None:
    # Given a pipe whose writer is slow
    process = subprocess.Popen(
        [sys.executable, "-m", "slatemq.cli", "tq", "append", "slow.tq", "--lines"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(b"one\ntwo\n")
    process.stdin.flush()

    # Then what has come is in the file
    slow = Path("slow.tq")
    wait_until(lambda: slow.exists() and slow.read_text() == "-one\n-two\n", 60)

    # And Ctrl-C ends it with the count
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.strip()) == (130, b"appended: 2\n", b"")


def test_a_code_without_room_for_it_is_reported(run: Terminal, file: Path) -> None:
    offset = str(CONTENT.index("-photo 8"))

    run("fail", "jobs.tq", offset, "--code", "E-1")

    assert (
        run.err
        == f"slatemq: {offset}: the code is not stored, because there is no variable error\n"
    )
    token = run("next", "jobs.tq", "--claim").split("\t")[0]
    run("fail", "jobs.tq", token, "--code", "E-1")
    assert run.err == ""


def test_done_takes_offsets_from_a_pipe_and_shows_each(run: Terminal, file: Path) -> None:
    offsets = [line.split("\t")[0] for line in run("ls", "jobs.tq").splitlines()]
    stdin = "\n".join([*offsets, offsets[0], "1"]).encode()

    results = run.objects("done", "jobs.tq", "-", "--json", stdin=stdin, code=1)

    assert [result["ok"] for result in results] == [True, True, False, False]
    assert [result["error"]["reason"] for result in results[2:]] == [
        "ALREADY_MARKED",
        "ENTRY_NOT_FOUND",
    ]
    assert run("ls", "jobs.tq") == ""


def test_set_fills_what_is_reserved(run: Terminal, file: Path) -> None:
    offset = str(CONTENT.index("-photo 7"))

    run("set", "jobs.tq", offset, "error", "late")
    run("set", "jobs.tq", offset, "0", "9")
    run("set", "jobs.tq", offset, "retries", "1000", code=1)

    assert "needs 4 bytes, 2 are reserved" in run.err
    assert "\\retries=9 \n\\error=late   \n" in file.read_text()


def test_check_counts_and_warns(run: Terminal, file: Path) -> None:
    assert run("check", "jobs.tq") == (
        "queued: 2  processed: 1  error: 1  comment: 1  unknown: 1\n"
    )
    assert "jobs.tq:10: unknown control character '>'" in run.err
    file.write_bytes(b"-a\r\n\\retries=x\n")
    assert run.objects("check", "jobs.tq", "--json")[0]["queued_count"] == 1
    assert run.err.count("jobs.tq:1: ") == 1
    assert "jobs.tq:2: retries must be a number, not 'x'" in run.err
    file.write_bytes(b"-a\n\\retries=3\r\n")
    run("check", "jobs.tq")
    assert "jobs.tq:2: retries must be a number, not '3\\r'" in run.err


@pytest.mark.parametrize("command", ["ls", "check", "compact"])
def test_a_broken_file_is_wrong_input(run: Terminal, file: Path, command: str) -> None:
    file.write_bytes(b"-a\n-b\n\\c\n d\n")

    run(command, "jobs.tq", code=2)

    assert run.err == (
        "slatemq: jobs.tq:4:1: a continuation after a variable: it begins with a space: "
        "move it above the variables, or begin the line with - = ! # or \\\n"
    )


def test_compact_leaves_out_what_is_finished(run: Terminal, file: Path) -> None:
    assert run("compact", "jobs.tq") == "removed: 1  kept: 5\n"
    [result] = run.objects("compact", "jobs.tq", "--errors", "--json")
    assert (result["removed_count"], result["kept_count"]) == (1, 4)
    assert run("ls", "jobs.tq", "--state", "all").count("\n") == 4


def test_next_gives_the_first_of_a_state_where_one_is_asked_for(run: Terminal, file: Path) -> None:
    states = ("queued", "processed", "error", "comment", "unknown", "all")
    texts = [run("next", "jobs.tq", "--state", state, "--text") for state in states]

    assert texts == [
        "photo 7\tin two\nlines\n",
        "photo 6\n",
        "photo 5\n",
        " what is to be done\n",
        "later kind\n",
        " what is to be done\n",
    ]
    assert run("next", "jobs.tq", "--state", "error", "--state", "unknown", "--text") == "photo 5\n"
    file.write_text("")
    assert run("next", "jobs.tq", "--state", "all") == ""
    assert "jobs.tq has no entry" in run.err
    assert run("next", "jobs.tq", "--state", "queued", "--state", "error") == ""
    assert "jobs.tq has no queued or error entry" in run.err


def test_a_variable_whose_index_is_beyond_all_numbers_is_not_there(
    run: Terminal, file: Path
) -> None:
    place = str(CONTENT.index("-photo 7"))
    run("set", "jobs.tq", place, "9" * 5000, "x", code=1)
    assert "has no variable 999" in run.err


@pytest.mark.parametrize(
    "words",
    [
        ("ls", "nowhere.tq"),
        ("next", "nowhere.tq", "--claim"),
        ("done", "jobs.tq", "first"),
        ("append", "jobs.tq"),
        ("append", "jobs.tq", "a", "--lines"),
        ("append", "jobs.tq", "a", "--reserve", "x"),
        ("append", "jobs.tq", "a", "--reserve", "x=" + "9" * 5000),
        ("append", "-", "a"),
        ("done", "jobs.tq", "9" * 5000),
        ("next", "jobs.tq", "--claim", "--state", "error"),
        ("next", "jobs.tq", "--claim", "--text"),
        ("release", "jobs.tq", "0"),
        ("ls", "."),
        ("check", "jobs.tq", "--strict"),
    ],
)
def test_wrong_usage_and_input_end_with_2(
    run: Terminal, file: Path, words: tuple[str, ...]
) -> None:
    assert run(*words, code=2) == ""
    assert run.err


def test_streams_that_the_shell_has_closed_are_empty_or_go_nowhere(file: Path) -> None:
    path = file.resolve()
    script = f"""
slatemq() {{ {sys.executable} -m slatemq.cli "$@"; }}
slatemq tq ls {path} >&- || exit 1
slatemq tq append {path} --lines <&- || exit 2
slatemq tq append {path} 'the last' <&- >&- 2>&- || exit 3
slatemq tq ls - <&- || exit 4
slatemq tq ls no-such-file 2>&-; [ $? = 2 ] || exit 5
"""
    ended = subprocess.run(
        ["sh", "-c", script],
        capture_output=True,
        cwd=REPOSITORY,
        timeout=60,
        check=False,
    )

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"appended: 0\n", b"")
    # And nothing was written into the file but the message
    assert file.read_text() == CONTENT + "-the last\n"


@pytest.mark.slow
def test_a_pipeline_of_commands(file: Path) -> None:
    # Given a shell with the command
    script = f"""
    set -e
    tq() {{ {sys.executable} -m slatemq.cli tq "$@"; }}
    seq 20000 | tq append many.tq --lines
    tq ls many.tq | head -n 1
    tq ls many.tq | grep '7$' | cut -f 1 | tq done many.tq -
    tq compact many.tq
    """

    out = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )

    assert out.stdout.splitlines() == [
        "appended: 20000",
        "0\tqueued\t1",
        "removed: 2000  kept: 18000",
    ]
    assert out.stderr == ""
