"""Queues as queue files and back: export and import, against a real stack."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from slatemq.cli.files.import_journal import Journal, Sending
from slatemq.cli.files.importing import Item, request_id
from slatemq.cli.files.queue_files import content_of
from slatemq.encryption import new_key
from slatemq.textqueue import State, TextQueue
from tests.acceptance.local_stack import wait_until
from tests.integration.cli.queue_file_calls import (
    contents,
    counts,
    dead_letters,
    edited,
    new_queue,
    objects,
)
from tests.integration.cli.stack import COMMAND, Cli

pytestmark = pytest.mark.stack

PAYLOADS = (
    b'{"order": 7}',
    b"two\nlines\n",
    b"  spaces  ",
    b"",
    b"-=!#\\ controls\n\\v=1\n-not a message",
    "ümläut, 北京 \u2028 and a \r return\r\n".encode(),
    bytes(range(256)),
    b"\0",
    b"\xff" * 1000,
)
HEADERS = {
    "plain": "value",
    "spaces ": " around ",
    "a=b": "c=d",
    "lines": "one\ntwo\\n",
    "empty": "",
    "ü": '"quoted"',
    "controls\x1b": "\0 \x07\r\x7f\ttab",
}


def test_an_import_reports_windows_line_ends(cli: Cli, tmp_path: Path) -> None:
    # Given a file that someone has written by hand on Windows
    queue, file = new_queue(cli, filter="false"), tmp_path / "jobs.tq"
    file.write_bytes(b"-one\r\n-two\r\n")

    # Then its text is kept, and that is reported once
    done = cli.ok("import", str(file), "--to", queue)
    assert done.err.count("carriage return") == 1
    assert ":1: lines end with a carriage return" in done.err
    wait_until(lambda: counts(cli, queue) == {"available": 2}, 60)
    assert [text for text, _ in contents(cli, queue)] == ["one\r", "two\r"]

    # But a header that no one would find again is refused
    file.write_bytes(b"-one\r\n\\header.type=order\r\n")
    refused = cli.run("import", str(file), "--to", queue)
    assert refused.code == 2
    assert ":2: the variable header.type ends with a carriage return" in refused.err
    # Unless it is written so that it is meant
    file.write_bytes(b'-three\n\\header-json=["type", "order\\r"]\n')
    assert cli.ok("import", str(file), "--to", queue).err == ""


def test_an_import_leaves_what_a_worker_holds_and_shows_what_it_does_not_know(
    cli: Cli, tmp_path: Path
) -> None:
    # Given a file that a worker has a message of, and a person, and one that no one knows
    queue, file = new_queue(cli, filter="false"), tmp_path / "jobs.tq"
    file.write_bytes("-one\n-two\n\\mutex=ann\n-three\n\ufefffour\n?five\n?six\n".encode())
    worker = TextQueue(file)
    claim = worker.claim()
    assert claim is not None

    # When it is imported, then these are left alone
    done = cli.ok("import", str(file), "--to", queue)
    assert "imported: 1  already stored: 0  skipped: 2" in done.out.decode()
    assert ":1: skipped, because it is claimed" in done.err
    assert ":2: skipped, because it is claimed" in done.err
    assert ":5: a byte order mark (BOM) makes this line an entry of an unknown kind" in done.err
    assert ":6: skipped, because '?' is not a known control character" in done.err
    assert ":7:" not in done.err
    assert [entry.text for entry in worker.entries(State.PROCESSED)] == ["three"]

    # And the worker finishes its own, or gives it back for the next import
    claim.release()
    done = cli.ok("import", str(file), "--to", queue)
    assert "imported: 1  " in done.out.decode()
    wait_until(lambda: counts(cli, queue) == {"available": 2}, 60)
    assert [text for text, _ in contents(cli, queue)] == ["three", "one"]


@pytest.mark.parametrize("text", ["# Title\n\nA list:\n\n- a\n- b\n", "list:\n- a\n"])
def test_a_file_that_begins_as_no_queue_file_does_is_refused_and_not_changed(
    cli: Cli, tmp_path: Path, text: str
) -> None:
    queue, file = new_queue(cli, filter="false"), tmp_path / "README.md"
    file.write_text(text)
    for arguments, given in (((str(file),), b""), (("-",), text.encode())):
        refused = cli.run("import", *arguments, "--to", queue, stdin=given)
        assert refused.code == 2
        assert "no entry of a queue file begins with" in refused.err
        assert "publish --jsonl" in refused.err
    assert file.read_text() == text
    assert counts(cli, queue) == {}


def test_any_payload_and_headers_go_through_a_file_and_back_byte_for_byte(
    cli: Cli, tmp_path: Path
) -> None:
    # Given messages of all kinds, available
    source, target = new_queue(cli, filter="false"), new_queue(cli, filter="false")
    first = tmp_path / "first.tq"
    queue = TextQueue(first)
    pairs = [f"header-json={json.dumps([k, v], ensure_ascii=False)}" for k, v in HEADERS.items()]
    for payload in PAYLOADS:
        encoded = base64.b64encode(payload).decode()
        queue.append(encoded, ["encoding=base64", *pairs])
    assert objects(cli, "import", str(first), "--to", source)[0]["imported_count"] == len(PAYLOADS)
    wait_until(lambda: counts(cli, source) == {"available": len(PAYLOADS)}, 60)

    # When they are exported, and imported into another queue
    second = tmp_path / "second.tq"
    cli.ok("export", source, "--state", "available", "--out", str(second))
    cli.ok("tq", "check", str(second), "--strict")
    cli.ok("import", str(second), "--to", target)
    wait_until(lambda: counts(cli, target) == {"available": len(PAYLOADS)}, 60)

    # Then nothing has changed on the way, and text is there as text
    assert contents(cli, target) == contents(cli, source)
    third = tmp_path / "third.tq"
    cli.ok("export", target, "--state", "available", "--out", str(third))

    def texts(path: Path) -> list[tuple[str, str]]:
        entries = TextQueue(path).entries(State.QUEUED, State.PROCESSED)
        return [(entry.text, entry.get("content")) for entry in entries]

    assert texts(second) == texts(third)
    assert [text for text, _ in texts(third)][:6] == [one.decode() for one in PAYLOADS[:6]]
    assert contents(cli, target)[0][1] == HEADERS


def test_states_have_their_characters_and_what_people_want_to_know(
    cli: Cli, tmp_path: Path
) -> None:
    queue = new_queue(cli, max_attempts=1)
    dead_letters(cli, queue, b"broken", headers={"type": "order"})
    cli.ok("publish", "--to", queue, "fine")
    wait_until(lambda: counts(cli, queue).get("available") == 1, 60)
    (claimed,) = objects(cli, "claim", queue, "--wait", "30s")
    cli.ok("ack", claimed["lease_token"])

    for state, control in (("failed", "!"), ("done", "=")):
        cli.ok("export", queue, "--state", state, "--out", str(tmp_path / f"{state}.tq"))
        entry = next(TextQueue(tmp_path / f"{state}.tq").entries(State.ERROR, State.PROCESSED))
        assert entry.control == control
        assert entry.get("handle").startswith(f"{queue}/{int(entry.get('id')):x}/")
        assert entry.get("attempts") == "1"
    dead_letter = next(TextQueue(tmp_path / "failed.tq").entries(State.ERROR))
    assert (dead_letter.text, dead_letter.get("header.type")) == ("broken", "order")
    assert "no such street" in dead_letter.get("reason")
    assert "no such street" in dead_letter.get("attempt")
    for name in ("failed_at", "created_at", "received_at"):
        assert dead_letter.get(name).startswith("20")
        assert dead_letter.get(name).endswith("Z")

    # And a file that is there is not written over
    again = ("export", queue, "--state", "failed", "--out", str(tmp_path / "failed.tq"))
    assert cli.run(*again).code == 2
    assert objects(cli, *again, "--force")[0]["exported_count"] == 1
    assert [path.name for path in sorted(tmp_path.glob("*.tq*"))] == ["done.tq", "failed.tq"]


def test_a_time_that_has_no_date_is_shown_and_goes_through_a_file_and_back(
    cli: Cli, tmp_path: Path
) -> None:
    # Given a dead letter whose producer took microseconds for milliseconds, and a delayed message
    created_ms, visible_ms = 1_764_000_000_000_000, (1 << 63) - 1
    queue = new_queue(cli, max_attempts=1)
    cli.client.publish(b"x", {"queue": queue}, created_at=created_ms)
    cli.client.publish(b"late", {"queue": queue}, visible_at=visible_ms)
    wait_until(lambda: counts(cli, queue) == {"available": 1, "delayed": 1}, 60)
    (claimed,) = cli.client.claim(queue, wait=60)
    claimed.nack("no such street")

    # Then commands show both
    (delayed,) = objects(cli, "message", "ls", queue, "--state", "delayed")
    assert str(visible_ms) in cli.ok("message", "ls", queue, "--state", "delayed").out.decode()
    shown = cli.ok("message", "show", delayed["handle"]).out.decode()
    assert f"delayed until {visible_ms}" in shown
    edit = edited(cli, queue, tmp_path, f"assert 'created_at={created_ms}' in text")
    assert (edit.code, "nothing was changed" in edit.err) == (0, True)

    # And it is the same where a file is published
    file = tmp_path / "letters.tq"
    cli.ok("export", queue, "--state", "failed", "--out", str(file))
    cli.ok("import", str(file), "--publish", "--state", "error")
    wait_until(lambda: counts(cli, queue).get("available") == 1, 60)
    (published,) = objects(cli, "message", "ls", queue, "--headers")
    assert published["created_at_ms"] == created_ms


def test_an_import_marks_what_it_has_done_and_a_second_one_does_nothing(
    cli: Cli, tmp_path: Path
) -> None:
    queue, file = new_queue(cli, filter="false"), tmp_path / "jobs.tq"
    file.write_text("# mine\n-one\n=two\n-three\n!four\n")

    (first,) = objects(cli, "import", str(file), "--to", queue)
    (second,) = objects(cli, "import", str(file), "--to", queue)

    assert (first["imported_count"], first["skipped_count"]) == (2, 2)
    assert (second["imported_count"], second["skipped_count"]) == (0, 4)
    assert file.read_text() == "# mine\n=one\n=two\n=three\n!four\n"
    wait_until(lambda: counts(cli, queue) == {"available": 2}, 60)
    # And each state may be asked for
    errors = cli.ok("import", str(file), "--to", queue, "--state", "error")
    assert "a second import repeats it" in errors.err
    wait_until(lambda: counts(cli, queue) == {"available": 3}, 60)
    assert file.read_text() == "# mine\n=one\n=two\n=three\n!four\n"
    # And what can be imported twice is told
    file.write_text("-five\n")
    assert "repeats it" in cli.ok("import", str(file), "--to", queue, "--no-mark").err
    assert "repeats it" not in cli.ok("import", str(file), "--to", queue).err


@pytest.mark.parametrize("how", ["--to", "--publish"])
def test_messages_that_are_alike_are_each_imported(cli: Cli, tmp_path: Path, how: str) -> None:
    # Given two files with the same message at the same place
    queue = new_queue(cli)
    target = ["--to", queue] if how == "--to" else ["--publish"]
    content = f"-tick\n\\header.queue={queue}\n"
    files = [tmp_path / "a.tq", tmp_path / "b.tq"]
    for file in files:
        file.write_text(content)

    # When both are imported, one is filled again, and the same comes from stdin, twice
    for file in files:
        cli.ok("import", str(file), *target)
    cli.ok("tq", "compact", str(files[0]))
    cli.ok("tq", "append", str(files[0]), "tick", "--var", f"header.queue={queue}")
    (third,) = objects(cli, "import", str(files[0]), *target)
    for _ in range(2):
        cli.ok("import", "-", *target, stdin=content.encode())

    # Then each is in the queue, as the counts have it
    assert (third["imported_count"], third["duplicate_count"]) == (1, 0)
    wait_until(lambda: counts(cli, queue) == {"available": 5}, 60)


def test_stdin_given_again_after_a_failure_is_imported_once(cli: Cli) -> None:
    # Given input that cannot be read to its end
    queue = new_queue(cli, filter="false")
    good = b"".join(b"-message %d\n" % number for number in range(1200))
    failed = cli.run("import", "-", "--to", queue, stdin=good + b"-bad\n\\encoding=rot13\n")
    assert failed.code == 2
    assert "stdin:1202: the variable encoding" in failed.err
    assert "1,000 messages were imported before the error" in failed.err

    # When it is repaired, and given again
    (done,) = cli.ok("import", "-", "--to", queue, "--json", stdin=good).objects

    assert done["imported_count"] == 1200
    wait_until(lambda: counts(cli, queue) == {"available": 1200}, 60)


def test_ctrl_c_ends_an_import_whose_input_is_silent(cli: Cli) -> None:
    process = cli.start("import", "-", "--to", new_queue(cli, filter="false"))
    assert process.stdin is not None
    process.stdin.write(b"-one\n")
    process.stdin.flush()
    # It has begun to read when it has taken up the name of its run.
    folder = cli.state / "slatemq" / "publish"
    before = set(folder.glob("*.json")) if folder.exists() else set()
    wait_until(lambda: folder.exists() and bool(set(folder.glob("*.json")) - before), 60)

    process.send_signal(signal.SIGINT)

    assert process.wait(30) == 130
    process.communicate()


def test_a_published_import_has_its_headers_and_dedupe_keys(cli: Cli, tmp_path: Path) -> None:
    queue, file = new_queue(cli), tmp_path / "jobs.tq"
    content = "".join(
        f"-{text}\n\\id={number}\n\\header.queue={queue}\n"
        for number, text in enumerate(("one", "two"), 1)
    )
    content += "-unwanted\n\\id=3\n"
    file.write_text(content)

    (first,) = objects(cli, "import", str(file), "--publish")
    file.write_text(content)
    (second,) = objects(cli, "import", str(file), "--publish")

    assert (first["imported_count"], first["duplicate_count"]) == (3, 0)
    assert (second["imported_count"], second["duplicate_count"]) == (0, 3)
    wait_until(lambda: counts(cli, queue) == {"available": 2}, 60)


@pytest.mark.slow
def test_an_import_killed_at_any_moment_loses_and_doubles_nothing(cli: Cli, tmp_path: Path) -> None:
    # Given a file that does not run empty, and imports of it that are killed
    queue, file = new_queue(cli, filter="false"), tmp_path / "jobs.tq"
    journal = Path(f"{file}.importing")

    def stored_at_ns() -> int | None:
        try:
            return journal.stat().st_mtime_ns
        except FileNotFoundError:
            return None

    file.touch()
    messages: list[str] = []
    kills = 0
    while kills < 12:
        if not any(TextQueue(file)):
            more = [f"message {len(messages) + number}" for number in range(12_000)]
            TextQueue(file).append_all(more)
            messages += more
        before = stored_at_ns()
        process = cli.start("import", str(file), "--to", queue)

        def is_under_way() -> bool:
            return stored_at_ns() != before or process.poll() is not None  # noqa: B023

        wait_until(is_under_way, 60)
        time.sleep(0.01 * (kills % 7))
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.communicate()

    # When one comes to its end
    cli.ok("import", str(file), "--to", queue)

    # Then each message is in the queue once, and the file says so
    wait_until(lambda: counts(cli, queue) == {"available": len(messages)}, 120)
    out = tmp_path / "out.tq"
    cli.ok("export", queue, "--state", "available", "--out", str(out))
    assert sorted(entry.text for entry in TextQueue(out)) == sorted(messages)
    assert not list(TextQueue(file))
    assert not journal.exists()


def test_what_was_under_way_long_ago_is_asked_about(cli: Cli, tmp_path: Path) -> None:
    # Given an import that ended while its batch was under way, an hour ago
    queue, file = new_queue(cli, filter="false"), tmp_path / "jobs.tq"
    journal = Path(f"{file}.importing")

    def left() -> None:
        file.write_text("-one\n-two\n")
        batch = [Item(entry, content_of(entry, "")) for entry in TextQueue(file)]
        at_ms = time.time_ns() // 1_000_000 - 3_600_000
        sending = Sending([0, 5], request_id(f"--to {queue}", batch, "secret"), at_ms)
        Journal(journal, f"--to {queue}", ["queued"], "secret", sending=sending).store()

    left()
    refused = cli.run("import", str(file), "--to", queue)
    assert refused.code == 2
    assert "--unsure" in refused.err
    assert file.read_text() == "-one\n-two\n"

    cli.ok("import", str(file), "--to", queue, "--unsure", "skip")
    assert file.read_text() == "=one\n=two\n"
    assert counts(cli, queue) == {}
    left()
    cli.ok("import", str(file), "--to", queue, "--unsure", "repeat")
    # A file that was changed since cannot be told
    left()
    file.write_text("-other\n-two\n")
    refused = cli.run("import", str(file), "--to", queue)
    assert "the file was changed since" in refused.err
    assert cli.run("import", str(file), "--to", queue, "--unsure", "skip").code == 2
    other = cli.run("import", str(file), "--publish")
    assert "is not complete" in other.err
    journal.unlink()
    wait_until(lambda: counts(cli, queue) == {"available": 2}, 60)
    assert not journal.exists()


def test_an_import_that_is_refused_leaves_nothing_behind(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "jobs.tq"
    file.write_text("-one\n")

    refused = cli.run("import", str(file), "--to", "nosuch")

    assert refused.code == 1
    assert "queue 'nosuch' does not exist" in refused.err
    assert file.read_text() == "-one\n"
    assert not Path(f"{file}.importing").exists()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b" no entry\n", "1:1"),
        (b"-a\n b\n\\encoding=rot13\n", ":3: the variable encoding"),
        (b"-%\n\\encoding=base64\n", ":1: the text is not base64"),
        (b"# x\n-a\n\\header-json={}\n", ":3: header-json"),
        (b"-a\n\\header.x=1\n\n\\header.x=2\n", ":4: the header 'x' is given twice"),
        (b"-a\n\\n=1\n\\retention=long\n", ":3: the variable retention"),
        (b"-a\n\\created_at=yesterday\n", ":2: the variable created_at"),
        (b"-a\xff\n", "not UTF-8"),
    ],
)
def test_what_cannot_be_read_is_named_with_file_and_line(
    cli: Cli, tmp_path: Path, content: bytes, text: str
) -> None:
    queue, file = new_queue(cli, filter="false"), tmp_path / "bad.tq"
    file.write_bytes(content)

    refused = cli.run("import", str(file), "--to", queue)

    assert refused.code == 2
    assert f"{file}:" in refused.err
    assert text in refused.err
    assert counts(cli, queue) == {}


def test_an_export_takes_as_much_memory_for_many_long_messages_as_for_one(
    cli: Cli, tmp_path: Path
) -> None:
    queue, file, out = new_queue(cli, filter="false"), tmp_path / "f.tq", tmp_path / "out.tq"
    TextQueue(file).append_all(str(number) + "x" * (1 << 20) for number in range(48))
    cli.ok("import", str(file), "--to", queue)
    wait_until(lambda: counts(cli, queue) == {"available": 48}, 60)

    def peak_bytes(*options: str) -> int:
        words = (*COMMAND, "export", queue, "--state", "available", "--out", str(out), *options)
        with subprocess.Popen(words, env=cli.environ, stdout=subprocess.DEVNULL) as process:
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return used.ru_maxrss * 1024

    grown = peak_bytes() - peak_bytes("--limit", "1", "--force")

    assert grown < 32 << 20


def test_an_encrypted_queue_is_exported_and_imported_with_its_keys(
    cli: Cli, tmp_path: Path
) -> None:
    keys, file, sealed = tmp_path / "keys", tmp_path / "jobs.tq", tmp_path / "sealed.tq"
    keys.write_text(f"2026 {new_key()}\n")
    keys.chmod(0o600)
    queue, other = new_queue(cli), new_queue(cli)
    with_keys = ("--encryption-keys", str(keys))
    cli.ok(*with_keys, "publish", "--to", queue, "one lamp")
    wait_until(lambda: counts(cli, queue) == {"available": 1}, 60)

    # With the keys, a file has what was published, and is imported encrypted again
    export = ("export", "--state", "available")
    assert cli.ok(*with_keys, *export, queue, "--out", str(file)).err == ""
    assert "one lamp" in file.read_text()
    cli.ok(*with_keys, "import", str(file), "--to", other)
    wait_until(lambda: counts(cli, other) == {"available": 1}, 60)

    # Without them, it has ciphertext, and the command says which key is missing
    blind = cli.ok(*export, other, "--out", str(sealed))
    assert "one lamp" not in sealed.read_text()
    assert "encrypted with the key '2026'" in blind.err
    assert "--encryption-keys" in blind.err

    # Nor are plain text published by those without, nor ciphertext encrypted by those with
    again = ("import", "--state", "processed", "--to", other)
    refused = cli.run(*again, str(file))
    assert (refused.code, "it is plain text" in refused.err) == (2, True), refused
    refused = cli.run(*with_keys, "import", str(sealed), "--to", other)
    assert (refused.code, "is encrypted already" in refused.err) == (2, True), refused
    assert counts(cli, other) == {"available": 1}
    claimed = cli.ok(*with_keys, "--json", "claim", other, "--wait", "30s")
    (found,) = claimed.objects
    assert (found["payload"], found["headers"]["slatemq-key"]) == ("one lamp", "2026")

    # Nor what a claim has printed
    file.write_bytes(claimed.out)
    for source in (("--jsonl", str(file)), ("--file", str(file))):
        publish = ("publish", *source, "--to", queue)
        refused = cli.run(*publish)
        assert (refused.code, "it is plain text" in refused.err) == (2, True), refused
        cli.ok(*with_keys, *publish)
