"""Archived dead letters in files and in an editor, against a real stack with its janitor."""

from __future__ import annotations

import base64
import json
import signal
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import slatemq.sync
from libs.storage.database.roots import open_root
from services.janitor.jobs.archive import DEAD_LETTERS, DayFolder
from slatemq._admin.settling import ArchivedDeadLetter, ArchivedOutcome
from slatemq.textqueue import State, TextQueue
from tests.acceptance.local_stack import wait_until
from tests.forms import seeds
from tests.integration.cli.queue_file_calls import (
    contents,
    counts,
    dead_letters,
    edited,
    new_queue,
    objects,
)
from tests.integration.cli.stack import Cli
from tests.integration.cli.test_repair import archive
from tests.unit.janitor.test_archive import Waits

pytestmark = pytest.mark.stack

KILLS_MAX = 10
"""At least one of these commands is killed before it has come to its end."""


def archived_letters(
    cli: Cli, queue: str, *payloads: bytes, headers: dict[str, str] | None = None
) -> None:
    """Archives letters with these payloads as the janitor does: the parts first."""
    dead_letters(cli, queue, *payloads, headers=headers)
    rows: list[dict[str, Any]] = []
    for dead_letter in objects(cli, "failed", "ls", queue):
        (result,) = objects(cli, "failed", "show", dead_letter["handle"])
        text, encoded = result.get("payload"), result.get("payload_base64")
        rows.append(
            {
                "message_id": int(result["message_id"]),
                "failed_at": _moment(result["finished_at_ms"]),
                "broker_shard": 0,
                "created_revision": 1,
                "attempts": result["attempts_count"],
                "priority": result["priority"],
                "reason": result["reason"],
                "created_at": _moment(result["created_at_ms"]),
                "received_at": _moment(result["received_at_ms"]),
                "retention_s": result["retention_s"],
                "headers": list(result["headers"].items()),
                "history": [
                    {
                        "attempt": number,
                        "consumer": one["consumer_id"],
                        "claimed_at": _moment(one["claimed_at_ms"]),
                        "outcome": one["outcome"],
                        "failed_in": one["queue_id"],
                    }
                    for number, one in enumerate(result["attempts"], 1)
                ],
                "payload": text.encode() if text is not None else base64.b64decode(encoded),
                "run": "by-hand",
            }
        )
    objects_below = open_root(cli.stack.root, sync=False).objects
    for day in {row["failed_at"].date() for row in rows}:
        some = [row for row in rows if row["failed_at"].date() == day]
        table = pa.Table.from_pylist(some, schema=DEAD_LETTERS)
        DayFolder(Waits(), objects_below, queue, day).add(table)
    archive(cli, queue)


def _moment(moment_ms: int) -> datetime:
    return datetime.fromtimestamp(moment_ms / 1000, UTC)


def test_an_export_is_as_that_of_dead_letters(cli: Cli, tmp_path: Path) -> None:
    queue = new_queue(cli, max_attempts=1)
    archived_letters(cli, queue, b"one\ntwo", b"\xff\x00", headers={"type": "order"})
    out = tmp_path / "a.tq"

    text = cli.ok("export", queue, "--state", "archived", "--out", str(out)).out.decode()

    assert text.startswith("exported: 2 to")
    entries = {one.text: one for one in TextQueue(out).entries(State.ERROR)}
    assert sorted(entries) == ["/wA=", "one\ntwo"]
    one = entries["one\ntwo"]
    assert (one.get("reason"), one.get("run")) == ("nack: no such street", "by-hand")
    assert (one.get("header.type"), one.get("attempts")) == ("order", "1")
    assert one.get("attempt").endswith("nack: no such street")
    assert one.get("failed_at") <= one.get("archived_at")
    assert entries["/wA="].get("encoding") == "base64"
    newest = cli.ok(
        "export", queue, "--state", "archived", "--out", "-", "--newest", "--limit", "1"
    )
    assert newest.out.count(b"\n!") == 1
    none = cli.ok(
        "export", queue, "--state", "archived", "--out", "-", "--until", "2020-01-01T00:00:00Z"
    )
    assert b"\n!" not in none.out


def test_each_edit_does_what_it_says_once(cli: Cli, tmp_path: Path) -> None:
    queue = new_queue(cli, max_attempts=1)
    archived_letters(cli, queue, b"back", b"repair me", b"drop", b"stay", b"comment")
    assert counts(cli, queue) == {"archived": 5}
    file = tmp_path / "a.tq"
    script = f"""
text = text.replace('!back', '-back')
text = text.replace('!repair me', '-repaired')
text = text.replace('!drop', '=drop')
text = text.replace('!comment', '#comment')
open({str(file)!r}, 'w', encoding='utf-8', newline='').write(text)
"""
    done = edited(cli, queue, tmp_path, script, "--archived")

    assert done.code == 0, done
    assert "1 to redrive, 1 to replace, 1 to drop" in done.err
    text = done.out.decode()
    assert "-repair me" in text
    assert "+repaired" in text
    assert "1 redriven, 1 replaced, 1 dropped" in text
    wait_until(lambda: counts(cli, queue) == {"available": 2, "archived": 2}, 60)
    assert [payload for payload, _ in contents(cli, queue)] == ["back", "repaired"]
    left = cli.ok("export", queue, "--state", "archived", "--out", "-").out
    assert (b"!stay" in left, b"!comment" in left, left.count(b"\n!")) == (True, True, 2)

    # The file as it was edited finds them gone; once it was acted on, it knows what it did
    act = ("failed", "edit", queue, "--archived", "--file", str(file), "--yes")
    again = cli.run(*act, "--json")
    assert again.code == 1
    assert [(one["action"], one["ok"]) for one in again.objects] == [
        ("redrive", False),
        ("replace", False),
        ("drop", False),
    ]
    assert all("no longer archived" in one["error"] for one in again.objects)
    assert counts(cli, queue) == {"available": 2, "archived": 2}


def test_a_file_that_is_acted_on_again_knows_what_it_did(cli: Cli, tmp_path: Path) -> None:
    queue, file = new_queue(cli, max_attempts=1), tmp_path / "a.tq"
    archived_letters(cli, queue, b"back", b"repair me", b"drop", b"stay", b"later")
    cli.ok("export", queue, "--state", "archived", "--out", str(file))
    text = file.read_text().replace("!back", "-back").replace("!repair me", "-repaired")
    file.write_text(text.replace("!drop", "=drop"))
    act = ("failed", "edit", queue, "--archived", "--file", str(file), "--yes")
    cli.ok(*act)

    # When another one is added to what is asked for
    file.write_text(file.read_text().replace("!later", "-later"))
    again = objects(cli, *act)

    # Then it is done, and the others were already
    assert [(one["action"], one["ok"], one["already"]) for one in again] == [
        ("redrive", True, True),
        ("replace", True, True),
        ("drop", True, True),
        ("redrive", True, False),
    ]
    wait_until(lambda: counts(cli, queue) == {"available": 3, "archived": 1}, 60)
    result = cli.ok(*act)
    assert "nothing to do: 4 done already, 1 unchanged" in result.err


@pytest.mark.parametrize("number", seeds(4))
def test_an_edit_killed_at_any_moment_comes_to_its_end_and_does_nothing_twice(
    cli: Cli, tmp_path: Path, number: int
) -> None:
    """The short form kills at the first moment only."""
    # Given letters to bring back and to drop, and a command that is killed as soon as the file
    # says that they are under way, or a moment later
    for _ in range(KILLS_MAX):
        queue = new_queue(cli, max_attempts=1)
        file = tmp_path / f"{queue}.tq"
        archived_letters(cli, queue, *(b"%d" % one for one in range(4)))
        cli.ok("export", queue, "--state", "archived", "--out", str(file))
        text = file.read_text()
        for one, control in enumerate("--==" if number % 2 else "==--"):
            text = text.replace(f"!{one}\n", f"{control}{one}\n")
        file.write_text(text)
        act = ("failed", "edit", queue, "--archived", "--file", str(file), "--yes", "--json")
        killed = cli.start(*act)
        end = time.monotonic() + 60
        while "settled=.." not in file.read_text() and killed.poll() is None:
            assert time.monotonic() < end, "the file does not say that they are under way"
            time.sleep(0.001)
        time.sleep(number * 0.004)
        killed.kill()
        _, err = killed.communicate()
        if killed.returncode == -signal.SIGKILL or number:
            break  # Else it had come to its end before.
    else:
        pytest.fail(f"each of {KILLS_MAX} ended before it was killed, the last so: {err!r}")

    # When it is run again, then all of it is done, and nothing is reported as a conflict
    again = cli.ok(*act)
    assert [one["ok"] for one in again.objects] == [True] * 4
    wait_until(lambda: counts(cli, queue) == {"available": 2}, 60)
    back = [payload for payload, _ in contents(cli, queue)]
    assert sorted(back) == (["0", "1"] if number % 2 else ["2", "3"])
    assert "nothing to do: 4 done already" in cli.ok(*act[:-1]).err


def test_conflicts_are_reported_and_the_rest_is_done(cli: Cli, tmp_path: Path) -> None:
    queue = new_queue(cli, max_attempts=1)
    archived_letters(cli, queue, b"twice", b"gone", b"note", b"good")
    out = tmp_path / "a.tq"
    cli.ok("export", queue, "--state", "archived", "--out", str(out))
    text = out.read_text()
    start, end = text.index("!twice"), text.index("!gone")
    twice = text[start:end].replace("!twice", "-twice")
    text = text.replace("!twice", "=twice").replace("!gone", "-gone").replace("!good", "-good")
    out.write_text(text.replace("!note", "# asked the customer\n!note") + twice)
    with slatemq.sync.connect(cli.stack.endpoint) as client:
        found = {
            one.message.payload: one
            for one in client.read_archived(queue)
            if one.message is not None
        }
        gone = found[b"gone"]
        assert client.redrive_archived([ArchivedDeadLetter(gone, b"by another")]) == ["done"]
        outcomes = client.drop_archived([gone])
        assert outcomes == [ArchivedOutcome.GONE]
        handles = [found[b"good"].handle, gone.handle]
        assert [one.message_id for one in client.read_archived(queue, handles=handles)] == [
            found[b"good"].message_id
        ]

    done = cli.run("failed", "edit", queue, "--archived", "--file", str(out), "--yes")

    assert done.code == 1
    assert "1 redriven, 1 dropped, 3 not done" in done.out.decode()
    assert "archived dead letters take no notes" in done.out.decode()
    assert done.err.count("no longer archived") == 1
    assert "it is in the file more than once: line 8 counts" in done.err
    wait_until(lambda: counts(cli, queue) == {"available": 2, "archived": 1}, 60)
    assert sorted(payload for payload, _ in contents(cli, queue)) == ["by another", "good"]


def test_dead_letters_archived_while_they_are_edited_are_reported(cli: Cli, tmp_path: Path) -> None:
    queue = new_queue(cli, max_attempts=1)
    dead_letters(cli, queue, b"one")
    out = tmp_path / "f.tq"
    cli.ok("export", queue, "--state", "failed", "--out", str(out))
    out.write_text(out.read_text().replace("!one", "-one"))
    wrong = cli.run("failed", "edit", queue, "--archived", "--file", str(out), "--yes", "--json")
    assert "without --archived" in json.loads(wrong.out)["error"]
    archive(cli, queue)

    done = cli.run("failed", "edit", queue, "--file", str(out), "--yes", "--json")

    assert done.code == 1
    assert "--archived" in json.loads(done.out)["error"]
    assert counts(cli, queue) == {"archived": 1}
    # Its content is not in the archive, so it can only be dropped
    left = cli.ok("export", queue, "--state", "archived", "--out", "-").out
    assert b"gone=" in left
