"""Dead letters in an editor, against a real stack."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from slatemq.textqueue import State, TextQueue
from tests.acceptance.local_stack import wait_until
from tests.forms import proof
from tests.integration.cli.queue_file_calls import (
    contents,
    counts,
    dead_letters,
    edited,
    new_queue,
    objects,
)
from tests.integration.cli.stack import Cli

pytestmark = pytest.mark.stack


def test_each_edit_does_what_it_says_after_a_yes(cli: Cli, tmp_path: Path) -> None:
    queue = new_queue(cli, max_attempts=1)
    dead_letters(cli, queue, b"back", b"fix me", b"drop", b"stay", b"comment", b"delete", b"note")

    script = """
text = text.replace('!back', '-back')
text = text.replace('!fix me', '-fixed\\n twice')
text = text.replace('!drop', '=drop')
text = text.replace('!comment', '#comment')
start = text.index('!delete'); end = text.index('!note')
text = text[:start] + text[end:]
text = text.replace('!note', '# asked the customer\\n!note')
"""
    done = edited(cli, queue, tmp_path, script)

    assert done.code == 0, done
    assert "1 to redrive, 1 to replace, 1 to drop, 1 to note" in done.err
    text = done.out.decode()
    assert "-fix me" in text
    assert "+fixed" in text
    assert "1 redriven, 1 replaced, 1 dropped, 1 noted" in text
    wait_until(lambda: counts(cli, queue) == {"available": 2, "done": 2, "failed": 4}, 60)
    assert [payload for payload, _ in contents(cli, queue)] == ["back", "fixed\ntwice"]
    left = {o["message_id"]: o for o in objects(cli, "failed", "ls", queue)}
    payloads = {one: objects(cli, "failed", "show", left[one]["handle"])[0] for one in left}
    assert sorted(o["payload"] for o in payloads.values()) == ["comment", "delete", "note", "stay"]
    noted = next(one for one in payloads.values() if one["payload"] == "note")
    assert noted["attempts"][-1]["outcome"] == "note: asked the customer"
    done_list = {o["transferred_to"]: o for o in objects(cli, "done", "ls", queue)}
    assert set(done_list) == {"", queue}
    assert all("slatemq failed edit" in one["consumer_id"] for one in done_list.values())
    # What was done leaves no file behind
    assert not list((cli.state / "slatemq" / "edit").glob(f"{queue}*"))

    # And the note is there the next time, and not noted again
    again = edited(cli, queue, tmp_path, "assert '# asked the customer\\n!note' in text")
    assert (again.code, "nothing was changed" in again.err) == (0, True)
    again = edited(cli, queue, tmp_path, "text += '# at the end\\n'")
    assert "nothing to do" in again.err


def test_a_replaced_dead_letter_keeps_its_headers_unless_they_were_edited(
    cli: Cli, tmp_path: Path
) -> None:
    queue = new_queue(cli, max_attempts=1)
    dead_letters(cli, queue, b"one", b"\xff\x00", headers={"type": "order", "n": "1"})

    script = "text = text.replace('!', '-').replace('header.n=1', 'header.n=2')"
    done = edited(cli, queue, tmp_path, script)

    assert done.code == 0, done
    assert "-header n=1" in done.out.decode()
    wait_until(lambda: counts(cli, queue) == {"available": 2, "done": 2}, 60)
    assert contents(cli, queue) == [
        (payload, {"type": "order", "n": "2", "queue": queue}) for payload in ("one", "/wA=")
    ]


@pytest.mark.parametrize("answer", [b"n\n", b""])
def test_without_a_yes_nothing_is_done_and_the_file_is_kept(
    cli: Cli, tmp_path: Path, answer: bytes
) -> None:
    queue = new_queue(cli, max_attempts=1)
    dead_letters(cli, queue, b"one")

    done = edited(cli, queue, tmp_path, "text = text.replace('!', '-')", answer=answer)

    assert done.code == 130
    assert counts(cli, queue) == {"failed": 1}
    (kept,) = (cli.state / "slatemq" / "edit").glob(f"{queue}*")
    assert str(kept) in done.err
    # It can be gone on with, without an editor
    assert cli.ok("failed", "edit", queue, "--file", str(kept), "--yes").out
    assert counts(cli, queue) == {"available": 1}
    kept.unlink()


def test_an_editor_that_fails_and_a_file_that_is_broken_do_nothing(
    cli: Cli, tmp_path: Path
) -> None:
    queue = new_queue(cli, max_attempts=1)
    dead_letters(cli, queue, b"one")

    failed = edited(cli, queue, tmp_path, "sys.exit(3)")
    broken = edited(cli, queue, tmp_path, "text = ' nothing above\\n' + text.replace('!', '-')")

    assert (failed.code, broken.code) == (2, 2)
    assert "ended with exit status 3" in failed.err
    assert ":1:1: a continuation before any entry" in broken.err
    assert counts(cli, queue) == {"failed": 1}
    assert edited(cli, new_queue(cli), tmp_path, "sys.exit(3)").code == 0
    # And a file is kept where something was edited, not otherwise
    (kept,) = (cli.state / "slatemq" / "edit").glob(f"{queue}*")
    assert "kept" in broken.err
    assert str(kept) in broken.err
    gone = edited(cli, queue, tmp_path, "import os; os.unlink(path); sys.exit(0)")
    assert (gone.code, "removed the file" in gone.err) == (2, True)
    assert "kept" not in failed.err + gone.err
    kept.unlink()


def test_comments_are_noted_once_however_often_the_file_is_acted_on(
    cli: Cli, tmp_path: Path
) -> None:
    # Given a letter with two comments above it, which were noted
    queue, file = new_queue(cli, max_attempts=1), tmp_path / "f.tq"
    dead_letters(cli, queue, b"one")
    cli.ok("export", queue, "--state", "failed", "--out", str(file))
    file.write_text(file.read_text().replace("!one", "# asked ann\n# and joe\n twice\n!one"))
    act = ("failed", "edit", queue, "--file", str(file), "--yes")
    assert "1 noted" in cli.ok(*act).out.decode()

    # When someone else acts on the file
    file.write_text(file.read_text().replace("\\session=", "\\session=another-"))
    again = cli.ok(*act)

    # Then nothing is noted again
    assert "nothing to do: 1 unchanged" in again.err
    (dead_letter,) = objects(cli, "failed", "ls", queue)
    assert dead_letter["attempts"][-1]["outcome"] == "note: asked ann\nand joe\ntwice"
    assert len(dead_letter["attempts"]) == 2


def test_ctrl_c_in_the_editor_is_the_editors(cli: Cli, tmp_path: Path) -> None:
    queue = new_queue(cli, max_attempts=1)
    dead_letters(cli, queue, b"one")

    script = """
import os, signal
pid, name = os.getpid(), 'sh'
while name == 'sh':  # which the command has run the editor by
    pid = int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])
    name = open(f'/proc/{pid}/comm').read().strip()
os.kill(pid, signal.SIGINT)
text = text.replace('!one', '-one')
"""
    done = edited(cli, queue, tmp_path, script)

    assert done.code == 0, done
    assert counts(cli, queue) == {"available": 1}


def test_what_happened_meanwhile_is_reported_and_nothing_is_done_twice(
    cli: Cli, tmp_path: Path
) -> None:
    # Given an export of dead letters
    queue, file = new_queue(cli, max_attempts=1), tmp_path / "f.tq"
    dead_letters(cli, queue, b"redriven", b"again", b"dropped", b"mine", b"fixed")
    cli.ok("export", queue, "--state", "failed", "--out", str(file))
    letters = {entry.text: entry.get("id") for entry in TextQueue(file).entries(State.ERROR)}

    # And meanwhile some were redriven, one of them failed again, and one was dropped
    cli.ok("failed", "redrive", queue, "--id", letters["again"])
    (claimed,) = objects(cli, "claim", queue, "--wait", "30s")
    cli.ok("nack", claimed["lease_token"], "--reason", "again")
    cli.ok("failed", "redrive", queue, "--id", letters["redriven"])
    edited(cli, queue, tmp_path, "text = text.replace('!dropped', '=dropped')")
    before = counts(cli, queue)
    assert before == {"available": 1, "failed": 3, "done": 1}

    # When the old export is edited and acted on
    text = file.read_text()
    for name in ("again", "dropped"):
        text = text.replace(f"!{name}", f"-{name}")
    text = text.replace("!fixed", "-fixed well").replace("!mine", "-mine")
    text = text.replace("!redriven", "=redriven")
    file.write_text(text)
    act = ("failed", "edit", queue, "--file", str(file), "--yes")
    done = cli.run(*act)

    # Then what can be done is done, and the rest is reported, by line
    assert done.code == 1, done
    assert "1 redriven, 1 replaced, 3 not done" in done.out.decode()
    assert "failed again at" in done.err
    assert "it was done meanwhile, by" in done.err
    assert "it was redriven meanwhile, and is available" in done.err
    wait_until(lambda: counts(cli, queue) == {"available": 3, "failed": 1, "done": 2}, 60)

    # And a second time does nothing, and knows what it did itself
    again = cli.run(*act, "--json")
    fields = {one["action"]: one for one in again.objects if one["ok"]}
    assert set(fields) == {"redrive", "replace"}
    assert [one["ok"] for one in again.objects].count(False) == 3
    assert counts(cli, queue) == {"available": 3, "failed": 1, "done": 2}


def test_a_file_that_was_acted_on_is_done_already_the_next_time(cli: Cli, tmp_path: Path) -> None:
    # Given an edited export that was acted on
    queue, file = new_queue(cli, max_attempts=1), tmp_path / "f.tq"
    dead_letters(cli, queue, b"back", b"fix me", b"drop")
    cli.ok("export", queue, "--state", "failed", "--out", str(file))
    text = file.read_text().replace("!back", "-back").replace("!drop", "=drop")
    file.write_text(text.replace("!fix me", "-fixed"))
    act = ("failed", "edit", queue, "--file", str(file), "--yes")
    assert "1 redriven, 1 replaced, 1 dropped" in cli.ok(*act).out.decode()

    # When it is acted on again, then nothing is said to be replaced that was replaced before
    result = cli.ok(*act).out.decode()
    assert "3 done already" in result
    assert "replace" not in result
    assert all(one["already"] for one in objects(cli, *act))
    # What was replaced is published again, and comes in a moment.
    wait_until(lambda: counts(cli, queue) == {"available": 2, "done": 2}, 60)


def test_with_json_what_is_shown_and_asked_is_no_part_of_stdout(cli: Cli, tmp_path: Path) -> None:
    queue, file = new_queue(cli, max_attempts=1), tmp_path / "f.tq"
    dead_letters(cli, queue, b"back", b"fix me")
    cli.ok("export", queue, "--state", "failed", "--out", str(file))
    text = file.read_text().replace("!back", "-back").replace("!fix me", "-fixed")
    file.write_text(text + "-new, by hand\n")
    act = ("failed", "edit", queue, "--file", str(file), "--json")

    refused = cli.run(*act, stdin=b"n\n")
    assert refused.out == b""
    done = cli.run(*act, stdin=b"y\n")

    assert {(one["action"], one["ok"]) for one in done.objects} >= {
        ("redrive", True),
        ("replace", True),
    }
    assert [one["ok"] for one in done.objects].count(False) == 1
    for result in (refused.err, done.err):
        assert "+fixed" in result
        assert "NOT " in result
        assert "1 to redrive, 1 to replace, 1 that cannot be done. Continue?" in result


def test_an_entry_that_stands_twice_counts_once_and_strangers_are_left_alone(
    cli: Cli, tmp_path: Path
) -> None:
    queue = new_queue(cli, max_attempts=1)
    dead_letters(cli, queue, b"one", b"two")

    script = """
start = text.index('!one'); end = text.index('!two')
text = text.replace('!', '-') + text[start:end].replace('!one', '-one, too')
text += '-new, by hand\\n!edited\\n'
"""
    done = edited(cli, queue, tmp_path, script)

    assert done.code == 1
    # Then that is told before anything is done, and after it
    text = done.out.decode()
    assert "it is in the file more than once: line 10 counts" in text
    assert "2 to redrive, 3 that cannot be done" in done.err
    assert "it is in the file more than once: line 10 counts" in done.err
    assert "`slatemq import` imports it" in text
    wait_until(lambda: counts(cli, queue) == {"available": 2}, 60)
    assert [payload for payload, _ in contents(cli, queue)] == ["one", "two"]
    # And in the same words when it is run again, though all is done
    (kept,) = (cli.state / "slatemq" / "edit").glob(f"{queue}*")
    again = cli.run("failed", "edit", queue, "--file", str(kept), "--yes")
    assert again.code == 1
    assert "it is in the file more than once: line 10 counts" in again.err
    assert "3 not done" in again.out.decode()
    assert counts(cli, queue) == {"available": 2}
    kept.unlink()


def test_an_edit_that_cannot_be_done_is_reported_and_kept_though_others_are_done(
    cli: Cli, tmp_path: Path
) -> None:
    queue = new_queue(cli, max_attempts=1)
    dead_letters(cli, queue, b"one", b"two")

    # When one is sent again, and another one was edited, but has its ! still
    done = edited(cli, queue, tmp_path, "text = text.replace('!one', '-one').replace('!two', '!2')")

    assert done.code == 1, done
    assert "1 redriven, 1 not done" in done.out.decode()
    assert "still begins with !" in done.err
    # Then what was edited is not lost, and programs learn of it, too
    (kept,) = (cli.state / "slatemq" / "edit").glob(f"{queue}*")
    assert "!2\n" in kept.read_text()
    again = cli.run("failed", "edit", queue, "--file", str(kept), "--yes", "--json")
    assert again.code == 1
    assert [(one["ok"], one["action"]) for one in again.objects if not one["ok"]] == [
        (False, "none")
    ]
    kept.unlink()


def test_a_second_line_that_lacks_its_space_is_reported(cli: Cli, tmp_path: Path) -> None:
    queue = new_queue(cli, max_attempts=1)
    dead_letters(cli, queue, b"one", b"two")

    # When two letters get second lines, which begin entries of their own
    script = "text = text.replace('!one', '!one\\nmore').replace('!two', '!two\\n# more')"
    done = edited(cli, queue, tmp_path, script)

    # Then no one takes that for letters that are to stay as they are
    assert done.code == 1, done
    text = done.out.decode()
    assert "'m' is not a known mark: indent continued lines by a space" in text
    assert text.count("it has no handle of a dead letter") == 2
    assert "3 that cannot be done" in done.err
    assert counts(cli, queue) == {"failed": 2}
    (kept,) = (cli.state / "slatemq" / "edit").glob(f"{queue}*")
    kept.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("letters", [400, proof(4000)])
def test_an_edit_killed_in_the_middle_and_run_again_does_nothing_twice(
    cli: Cli, tmp_path: Path, letters: int
) -> None:
    # Given letters, some thousand in the full form, half of them edited
    queue, file = new_queue(cli, max_attempts=1, filter="false"), tmp_path / "f.tq"
    source = tmp_path / "source.tq"
    TextQueue(source).append_all(f"letter {number}" for number in range(letters))
    cli.ok("import", str(source), "--to", queue)
    wait_until(lambda: counts(cli, queue) == {"available": letters}, 60)
    while counts(cli, queue).get("failed", 0) < letters:
        claimed = objects(cli, "claim", queue, "--max", "1000", "--wait", "30s")
        cli.ok("nack", *(one["lease_token"] for one in claimed))
    cli.ok("export", queue, "--state", "failed", "--out", str(file))
    lines = []
    for line in file.read_text().split("\n"):
        if line.startswith("!letter"):
            odd = int(line[8:]) % 2
            line = f"-{line[1:]}, fixed" if odd else f"-{line[1:]}"
        lines.append(line)
    file.write_text("\n".join(lines))

    # When it is acted on, and killed again and again
    for number in range(5):
        process = cli.start("failed", "edit", queue, "--file", str(file), "--yes", "--json")
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.02 * number)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    cli.ok("failed", "edit", queue, "--file", str(file), "--yes", "--json")

    # Then each is there once, those with odd numbers fixed
    wait_until(lambda: counts(cli, queue).get("available") == letters, 60)
    assert counts(cli, queue) == {"available": letters, "done": letters // 2}
    out = tmp_path / "out.tq"
    cli.ok("export", queue, "--state", "available", "--out", str(out))
    texts = sorted(entry.text for entry in TextQueue(out))
    assert texts == sorted(
        f"letter {number}" + (", fixed" if number % 2 else "") for number in range(letters)
    )
