"""`publish --jsonl` against a real stack: every byte, every line once, whatever comes between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from subprocess import Popen

import pytest

from tests.acceptance.local_stack import wait_until
from tests.integration.cli.stack import COMMAND, Cli

pytestmark = pytest.mark.stack

ODD_LINES = [b"", b"\r", b"\x00\xff\xfe", b' {"a": 1} ', "\u2028\x85é".encode(), b"x" * 70_000]


@pytest.fixture
def queue(cli: Cli) -> str:
    return cli.create()


def drain(cli: Cli, queue: str, count: int) -> list[bytes]:
    """The payloads of all messages that are stored, this many; they must have no newline."""
    # What routers have not read yet they do not count as pending.
    wait_until(lambda: cli.counts(queue)["available_count"] >= count, 60)
    wait_until(lambda: not any(one.pending_count for one in cli.client.status().routes), 60)
    count = cli.counts(queue)["available_count"]
    return cli.ok("consume", queue, "--max", str(count), "--wait", "60s").out.split(b"\n")[:-1]


def routes(cli: Cli) -> list[dict[str, int]]:
    (status,) = cli.ok("status", "--json").objects
    return list(status["routes"])


def numbered(first: int, last: int) -> bytes:
    return b"".join(b"line %d\n" % number for number in range(first, last + 1))


def durable(out: bytes) -> int:
    (line,) = out.splitlines()
    word, count = line.split()
    assert word == b"durable:"
    return int(count)


def remembered(cli: Cli) -> set[Path]:
    """The files of runs that may be gone on with."""
    return set((cli.state / "slatemq" / "publish").glob("*"))


def feed(publishing: Popen[bytes], lines: bytes) -> None:
    assert publishing.stdin is not None
    publishing.stdin.write(lines)
    publishing.stdin.flush()


def test_lines_come_out_byte_for_byte(cli: Cli, queue: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\n".join(ODD_LINES))

    published = cli.ok("publish", "--jsonl", str(tmp_path / "f"), "--to", queue)

    assert durable(published.out) == len(ODD_LINES)
    assert drain(cli, queue, len(ODD_LINES)) == ODD_LINES


def test_headers_come_from_the_lines(cli: Cli, tmp_path: Path) -> None:
    # Given queues that look at headers
    cli.ok("queue", "create", "numbers", "--filter", 'headers["n"] == "1.0"')
    cli.ok(
        "queue", "create", "flags", "--filter", 'headers["ok"] == "true" && headers["by"] == "me"'
    )
    lines = [b'{"n": 1.0}', b'{"n": 1}', b'{"x": {"ok": true}}', b'{"n": null, "x": 3}']

    # When lines are published with pointers
    cli.ok(
        *("publish", "--jsonl", "-", "--headers-from", "/n,/x/ok", "--header", "by=me", "--json"),
        stdin=b"\n".join(lines),
    )

    # Then each queue has its own
    assert drain(cli, "numbers", 1) == lines[:1]
    assert drain(cli, "flags", 1) == lines[2:3]


def test_a_pointer_that_no_line_has_is_noted(cli: Cli, queue: str) -> None:
    arguments = ("publish", "--jsonl", "-", "--headers-from", "/region,/regoin", "--to", queue)

    published = cli.ok(*arguments, stdin=b'{"region": "eu"}\n{"id": 7}\n')

    assert durable(published.out) == 2
    assert "no line has /regoin: no message has the header 'regoin'" in published.err
    assert "/region:" not in published.err
    assert "no line has" not in cli.ok(*arguments, stdin=b"").err


@pytest.mark.parametrize(
    ("bad", "why"),
    [(b'{"type": {}}', "object"), (b"{", "not JSON"), (b'{"type": "\xff"}', "UTF-8")],
)
def test_a_bad_line_is_named_and_the_count_goes_up_to_its_batch(
    cli: Cli, queue: str, bad: bytes, why: str
) -> None:
    lines = [b'{"type": "a"}'] * 1500
    lines[1234] = bad

    refused = cli.run(
        *("publish", "--jsonl", "-", "--headers-from", "/type", "--to", queue),
        stdin=b"\n".join(lines),
    )

    assert refused.code == 2
    assert "line 1235" in refused.err
    assert why in refused.err
    assert durable(refused.out) == 1000
    assert "--skip 1000" in refused.err


def test_a_refused_run_leaves_no_file_and_sets_no_deadline(cli: Cli, queue: str) -> None:
    # Given runs that end at a bad line, before and after something was published
    before = remembered(cli)
    pointers = ("--headers-from", "/type", "--to", queue)
    for good_lines in (0, 1500):
        lines = b'{"type": "a"}\n' * good_lines + b"{"
        refused = cli.run("publish", "--jsonl", "-", *pointers, stdin=lines)

        assert refused.code == 2
        assert refused.err.rstrip().endswith(
            f"continue with the same options and --skip {good_lines // 1000 * 1000}"
        )

    # And one with a line that the server refuses, and one with too little to skip
    refused = cli.run("publish", "--jsonl", "-", "--delay", "40000d", stdin=b"x")
    assert (refused.code, "line 1, delay_ms" in refused.err) == (1, True), refused
    assert cli.run("publish", "--jsonl", "-", "--skip", "9", stdin=b"x").code == 2
    # And an import whose first entry is refused
    assert cli.run("import", "-", "--to", queue, stdin=b"-bad\n\\encoding=rot13\n").code == 2

    assert remembered(cli) == before


def test_a_line_that_the_server_refuses_is_named(cli: Cli) -> None:
    many = json.dumps({f"k{n}": "v" for n in range(250)}).encode()
    pointers = ",".join(f"/k{n}" for n in range(250))
    headers = [word for n in range(6) for word in ("--header", f"h{n}=v")]

    refused = cli.run(
        *("publish", "--jsonl", "-", "--headers-from", pointers, *headers),
        stdin=b"{}\n" + many,
    )

    assert refused.code == 2
    assert "line 2" in refused.err


def test_a_file_published_twice_is_there_twice(cli: Cli, queue: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(numbered(1, 10))

    for _ in range(2):
        cli.ok("publish", "--jsonl", str(tmp_path / "f"), "--to", queue)

    assert sorted(Counter(drain(cli, queue, 20)).values()) == [2] * 10


def test_skipped_lines_are_left_out_and_counted(cli: Cli, queue: str) -> None:
    published = cli.ok(
        *("publish", "--jsonl", "-", "--to", queue, "--skip", "2", "--json"), stdin=numbered(1, 5)
    )

    assert published.objects == [{"durable_count": 5, "skipped_count": 2, "published_count": 3}]
    assert drain(cli, queue, 3) == [b"line 3", b"line 4", b"line 5"]


def test_more_lines_than_there_are_cannot_be_skipped(cli: Cli) -> None:
    refused = cli.run("publish", "--jsonl", "-", "--skip", "9", stdin=numbered(1, 5))

    assert refused.code == 2
    assert "only 5 lines" in refused.err


def test_ctrl_c_shows_how_far_it_came(cli: Cli, queue: str) -> None:
    # Given a source that is not at its end
    publishing = cli.start("publish", "--jsonl", "-", "--to", queue)
    feed(publishing, numbered(1, 2500))
    wait_until(lambda: cli.counts(queue)["available_count"] == 2000, 60)

    # When Ctrl-C comes, while it waits for more
    publishing.send_signal(signal.SIGINT)
    assert publishing.wait(timeout=60) == 130
    out, err = publishing.communicate()

    # Then the count is what is durable, and going on from it makes the file whole
    assert b"Traceback" not in err
    assert durable(out) == 2000
    again = cli.ok(
        "publish", "--jsonl", "-", "--to", queue, "--skip", "2000", stdin=numbered(1, 2500)
    )
    assert durable(again.out) == 2500
    assert Counter(drain(cli, queue, 2500)) == Counter(numbered(1, 2500).splitlines())


@pytest.mark.slow
def test_going_on_after_a_failure_doubles_nothing_whose_outcome_was_unknown(
    cli: Cli, queue: str
) -> None:
    # Given an ingest that stops answering when a part is published, and gets the rest all the same
    arguments = ("publish", "--jsonl", "-", "--to", queue)
    publishing = cli.start(*arguments, "--timeout", "10s")
    feed(publishing, numbered(1, 1000))
    wait_until(lambda: cli.counts(queue)["available_count"] == 1000, 60)
    ingest = cli.stack.signal("ingest", signal.SIGSTOP)
    try:
        out, err = publishing.communicate(numbered(1001, 2500), timeout=60)
    finally:
        os.kill(ingest, signal.SIGCONT)
    assert publishing.returncode == 3, err
    assert durable(out) == 1000
    assert b"--skip 1000, within 10 minutes" in err

    # When the user goes on from the count
    again = cli.ok(*arguments, "--skip", "1000", stdin=numbered(1, 2500))

    # Then every line is there once
    assert durable(again.out) == 2500
    assert Counter(drain(cli, queue, 2500)) == Counter(numbered(1, 2500).splitlines())


@pytest.mark.slow
def test_an_ingest_killed_on_the_way_loses_and_doubles_nothing(cli: Cli, queue: str) -> None:
    # Given a file half of which is published
    publishing = cli.start("publish", "--jsonl", "-", "--to", queue)
    feed(publishing, numbered(1, 2000))
    wait_until(lambda: cli.counts(queue)["available_count"] > 0, 60)

    # When ingest is killed, and comes back
    old = cli.stack.signal("ingest", signal.SIGKILL)
    out, err = publishing.communicate(numbered(2001, 6000), timeout=60)
    cli.stack.wait_restarted("ingest", old)

    # Then it went on by itself
    assert publishing.returncode == 0, err
    assert durable(out) == 6000
    assert Counter(drain(cli, queue, 6000)) == Counter(numbered(1, 6000).splitlines())


def test_a_bad_line_must_be_repaired_first(cli: Cli, queue: str) -> None:
    # When the second line is no JSON
    arguments = ("publish", "--jsonl", "-", "--to", queue, "--headers-from", "/a")
    result = cli.run(*arguments, stdin=b'{"a":"1"}\n{bad\n')

    # Then the advice is to repair it, and the count stands alone on stdout
    assert result.code == 2
    assert "line 2: " in result.err
    assert "fix line 2 first" in result.err
    assert durable(result.out) == 0


def test_a_skip_beyond_the_end_promises_nothing(cli: Cli, queue: str) -> None:
    result = cli.run("publish", "--jsonl", "-", "--to", queue, "--skip", "9", stdin=b"a\nb\n")

    assert result.code == 2
    assert "--skip 9 is beyond the end: the input has only 2 lines" in result.err
    assert result.out == b""


def test_the_count_is_the_last_thing_printed(cli: Cli, queue: str, tmp_path: Path) -> None:
    # When both streams go to one place
    both = tmp_path / "both"
    with both.open("wb") as file:
        subprocess.run(
            [*COMMAND, "publish", "--jsonl", "-", "--to", queue, "--headers-from", "/a"],
            input=b'{"a":{}}\n',
            stdout=file,
            stderr=file,
            env=cli.environ,
            check=False,
        )

    # Then
    assert both.read_text().splitlines()[-1] == "durable: 0"


@pytest.mark.slow
def test_a_large_file_takes_little_memory(cli: Cli, queue: str, tmp_path: Path) -> None:
    # Given a file much larger than what the command may hold
    line = b"x" * 1_000_000 + b"\n"
    with (tmp_path / "f").open("wb") as file:
        for _ in range(300):
            file.write(line)

    # When it is published
    publishing = cli.start("publish", "--jsonl", str(tmp_path / "f"), "--retention", "1s")
    peak_kib = 0
    while publishing.poll() is None:
        peak_kib = max(peak_kib, _peak_kib(publishing.pid))
        time.sleep(0.02)
    out, err = publishing.communicate()

    # Then it stays small
    assert publishing.returncode == 0, err
    assert durable(out) == 300
    assert 0 < peak_kib < 200_000


def _peak_kib(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(found[0].split()[1]) if found else 0
