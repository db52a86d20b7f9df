"""Delays, repair, dead letters, pauses and replays on the command line, against a real stack."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
from typing import Any
from uuid import uuid4

import grpc
import pytest

from slatemq.v1 import removal_pb2
from slatemq.v1.removal_pb2_grpc import RemovalServiceStub
from tests.acceptance.local_stack import peer_address, wait_until
from tests.integration.cli import queue_file_calls
from tests.integration.cli.stack import COMMAND, Cli

pytestmark = pytest.mark.stack


def new_queue(cli: Cli, **settings: Any) -> str:
    return cli.create(**settings)


def objects(cli: Cli, *arguments: str) -> list[Any]:
    return cli.ok(*arguments, "--json").objects


def counts(cli: Cli, queue: str) -> dict[str, int]:
    return {name.removesuffix("_count"): n for name, n in cli.counts(queue).items() if n}


def listed(cli: Cli, queue: str, state: str, count: int) -> list[Any]:
    """The messages of a state, once they are this many."""
    wait_until(lambda: counts(cli, queue).get(state, 0) == count, 60)
    found = objects(cli, "message", "ls", queue, "--state", state)
    assert len(found) == count
    return found


def dead_letter(cli: Cli, queue: str, payload: str) -> None:
    cli.ok("publish", "--to", queue, payload)
    (claimed,) = objects(cli, "claim", queue, "--wait", "30s")
    cli.ok("nack", claimed["lease_token"], "--reason", f"no {payload}")


def test_a_message_is_delayed_shown_edited_rescheduled_and_cancelled(cli: Cli) -> None:
    # Given a message that may be claimed in an hour
    queue = new_queue(cli)
    cli.ok("publish", "--to", queue, "--visible-at", "+1h", "first words")
    (entry,) = listed(cli, queue, "delayed", 1)
    assert objects(cli, "claim", queue) == []

    # When it is edited, then its content is another, and its etag
    (before,) = objects(cli, "message", "show", entry["handle"])
    edited = ("message", "edit", entry["handle"], "other words", "--header", "checked=yes")
    cli.ok(*edited, "--etag", before["etag"])
    (shown,) = objects(cli, "message", "show", entry["handle"])
    assert (shown["payload"], shown["headers"]) == ("other words", {"checked": "yes"})
    stale = cli.run("message", "edit", entry["handle"], "late words", "--etag", before["etag"])
    assert stale.code == 1
    assert shown["etag"] in stale.err

    # By its ID it is searched
    cli.ok("message", "edit", entry["message_id"], "last words", "--in", queue)
    (shown,) = objects(cli, "message", "show", entry["handle"])
    assert (shown["payload"], shown["headers"]) == ("last words", {"checked": "yes"})

    # When it is rescheduled to now, then it can be claimed
    (moved,) = objects(cli, "message", "reschedule", entry["handle"])
    assert moved["state"] == "available"
    assert listed(cli, queue, "available", 1)[0]["handle"] == moved["handle"]

    # When it is cancelled, then no one has it
    cli.ok("message", "cancel", moved["handle"])
    gone = cli.run("message", "show", moved["handle"])
    assert gone.code == 1
    assert "message ls" in gone.err
    assert counts(cli, queue) == {}


def test_a_message_is_found_by_its_id_in_every_queue(cli: Cli) -> None:
    queue = new_queue(cli)
    other = new_queue(cli, filter=f'headers["queue"] == "{queue}"')
    (published,) = objects(cli, "publish", "--to", queue, "twice")
    listed(cli, other, "available", 1)
    (claimed,) = objects(cli, "claim", queue, "--wait", "30s")
    cli.ok("ack", claimed["lease_token"])

    found = objects(cli, "message", "show", published["message_id"])

    assert {(one["queue_id"], one["state"]) for one in found} == {
        (queue, "done"),
        (other, "available"),
    }
    assert [one["message_id"] for one in objects(cli, "done", "ls", queue)] == [
        published["message_id"]
    ]
    missing = cli.run("message", "show", "4611686018427387903", "--json")
    assert missing.code == 1
    problem = json.loads(missing.err)["error"]
    assert problem["reason"] == "ENTRY_UNKNOWN"
    # Its advice does not lead back to this command
    assert "message show" not in problem["advice"]
    elsewhere = cli.run("message", "show", "4611686018427387903", "--in", queue)
    assert f"is not in {queue}; leave out --in to search all queues" in elsewhere.err
    nowhere = cli.run("message", "show", published["message_id"], "--in", "nosuch")
    assert nowhere.code == 1
    assert "queue 'nosuch' does not exist" in nowhere.err

    # And cancelled by its ID wherever it waits
    cancelled = objects(cli, "message", "cancel", published["message_id"])
    assert [one["cancelled"] for one in cancelled] == [True]
    assert cancelled[0]["handle"].startswith(other)
    again = cli.run("message", "cancel", published["message_id"], "--json")
    assert again.code == 1
    problem = json.loads(again.err)["error"]
    assert problem["reason"] == "OTHER_STATE"
    assert f"`slatemq message show {published['message_id']}`" in problem["advice"]


def archive(cli: Cli, queue: str) -> None:
    """Archives the dead letters of a queue, as the janitor does."""
    (result,) = objects(cli, "queue", "show", queue)
    rows = [
        removal_pb2.FailedRow(
            message_id=int(letter["message_id"]),
            failed_at_ms=letter["finished_at_ms"],
            bucket_order=int(letter["handle"].rpartition("/f")[2], 16),
        )
        for letter in objects(cli, "failed", "ls", queue)
    ]
    request = removal_pb2.RemoveEntriesRequest(
        queue_id=queue,
        created_revision=result["revision"],  # as long as no one has changed the queue
        archive=removal_pb2.ArchiveRemoval(rows=rows, run="by-hand"),
    )
    with grpc.insecure_channel(asyncio.run(peer_address(cli.stack, "broker"))) as channel:
        answer = RemovalServiceStub(channel).RemoveEntries(request)
    assert (answer.removed_count, len(answer.refused)) == (len(rows), 0)


def test_archived_dead_letters_are_listed_apart_with_the_run_that_has_them_and_purged(
    cli: Cli,
) -> None:
    queue = new_queue(cli, max_attempts=1)
    dead_letter(cli, queue, "a")
    archive(cli, queue)
    dead_letter(cli, queue, "b")

    (letter,) = objects(cli, "failed", "ls", queue, "--archived")
    assert (letter["state"], letter["archived"]["run"]) == ("archived", "by-hand")
    assert len(objects(cli, "failed", "ls", queue)) == 1
    assert b"by-hand" in cli.ok("failed", "ls", queue, "--archived", "--newest").out
    shown = cli.ok("failed", "show", letter["handle"]).out
    assert b"in the archive, from the run by-hand" in shown
    assert counts(cli, queue) == {"failed": 1, "archived": 1}

    cli.ok("failed", "purge", queue, "--yes")
    assert counts(cli, queue) == {"archived": 1}
    cli.ok("queue", "purge", queue, "--state", "archived", "--yes")
    assert counts(cli, queue) == {}


def test_dead_letters_are_listed_redriven_and_purged(cli: Cli) -> None:
    # Given three dead letters
    queue = new_queue(cli, max_attempts=1)
    for payload in ("a", "b", "c"):
        dead_letter(cli, queue, payload)
    dead_letters = objects(cli, "failed", "ls", queue)
    assert [letter["reason"] for letter in dead_letters] == [
        "nack: no a",
        "nack: no b",
        "nack: no c",
    ]
    newest = objects(cli, "failed", "ls", queue, "--newest", "--limit", "1")
    assert [letter["reason"] for letter in newest] == ["nack: no c"]
    (shown,) = objects(cli, "failed", "show", dead_letters[0]["handle"])
    assert (shown["payload"], shown["attempts"][0]["outcome"]) == ("a", "nack: no a")

    # When one is redriven by filter and one into another queue by ID
    other = new_queue(cli, filter="false")
    redrive = ("failed", "redrive", queue)
    (done,) = objects(cli, *redrive, "--filter", 'reason.endsWith("b") && attempts == 1')
    assert (done["state"], done["redriven_count"], done["examined_count"]) == ("done", 1, 3)
    moving = ("--into", other, "--id", dead_letters[2]["message_id"], "--rate", "0", "--no-wait")
    redrive_id = cli.ok(*redrive, *moving).out.decode().strip()

    # Then they wait there, with no attempts counted
    (back,) = listed(cli, queue, "available", 1)
    (there,) = listed(cli, other, "available", 1)
    assert (back["message_id"], back["attempts_count"]) == (dead_letters[1]["message_id"], 0)
    assert there["message_id"] == dead_letters[2]["message_id"]
    which = str(there["message_id"])
    fields = {one["queue_id"]: one for one in objects(cli, "message", "show", which)}
    assert [(one["outcome"], one["queue_id"]) for one in fields[other]["attempts"]] == [
        ("nack: no c", queue)
    ]
    assert (fields[queue]["state"], fields[queue]["transferred_to"]) == ("done", other)
    assert f" in {queue}: nack: no c" in cli.ok("message", "show", which).out.decode()
    redrives = objects(cli, "failed", "redrives", queue)
    assert [one["redrive_id"] for one in redrives] == [redrive_id, done["redrive_id"]]
    bad = cli.run(*redrive, "--filter", "reason ==")
    assert bad.code == 1
    assert "line 1" in bad.err

    # When the rest is thrown away, then nothing is left
    assert objects(cli, "failed", "purge", queue, "--yes")[0]["purged_count"] == 1
    assert objects(cli, "failed", "ls", queue) == []


@pytest.mark.parametrize("as_json", [False, True])
def test_a_redrive_shows_the_ids_that_are_no_dead_letters_and_moves_the_others(
    cli: Cli, as_json: bool
) -> None:
    # Given a dead letter, a message that is none, and an ID that nothing has
    queue = new_queue(cli, max_attempts=1)
    dead_letter(cli, queue, "a")
    (letter,) = objects(cli, "failed", "ls", queue)
    cli.ok("publish", "--to", queue, "b")
    (waiting,) = listed(cli, queue, "available", 1)
    known, others = str(letter["message_id"]), [str(waiting["message_id"]), "77"]
    options = ("--json",) if as_json else ()

    # When they are named with others
    named = [word for one in (others[0], known, others[1]) for word in ("--id", one)]
    mixed = cli.run("failed", "redrive", queue, *named, *options)

    # Then the letter has come back, and the others are told
    assert mixed.code == 1
    assert len(listed(cli, queue, "available", 2)) == 2
    items = [f"message {one} is not a dead letter of {queue}" for one in others]
    if as_json:
        *refused, done = mixed.objects
        assert [(one["message_id"], one["ok"]) for one in refused] == [
            (one, False) for one in others
        ]
        assert [one["error"]["message"] for one in refused] == items
        assert done["redriven_count"] == 1
    else:
        assert [line for line in mixed.err.splitlines() if "not a dead" in line] == [
            f"slatemq: {line}" for line in items
        ]
        assert b"1 moved" in mixed.out

    # And with none that is known no redrive begins
    none = cli.run("failed", "redrive", queue, "--id", "77", *options)
    assert none.code == 1
    assert len(objects(cli, "failed", "redrives", queue)) == 1


def test_ctrl_c_on_a_redrive_says_that_it_goes_on(cli: Cli) -> None:
    queue = new_queue(cli, max_attempts=1)
    queue_file_calls.dead_letters(cli, queue, *[b"x"] * 60)  # That takes a minute.

    redrive = cli.start("failed", "redrive", queue, "--rate", "1")
    assert redrive.stderr is not None
    begun = redrive.stderr.readline().decode()
    redrive.send_signal(signal.SIGINT)
    _, err = redrive.communicate(timeout=60)

    assert redrive.returncode == 130
    redrive_id = begun.split()[2]
    assert f"failed cancel {redrive_id}" in err.decode()
    cli.ok("failed", "cancel", redrive_id)


def test_a_paused_queue_hands_nothing_out_until_it_is_resumed(cli: Cli) -> None:
    queue = new_queue(cli)
    cli.ok("queue", "pause", queue)
    (row,) = cli.ok("queue", "ls", "--prefix", queue).out.decode().splitlines()[1:]
    assert row.split()[:2] == [queue, "(paused)"]
    cli.ok("publish", "--to", queue, "waits")
    refused = cli.run("claim", queue)
    assert refused.code == 1
    assert "queue resume" in refused.err

    cli.ok("queue", "resume", queue)

    assert len(objects(cli, "claim", queue, "--wait", "30s")) == 1


def test_a_purge_empties_a_queue_and_spares_what_is_in_flight(cli: Cli) -> None:
    queue = new_queue(cli)
    for _ in range(3):
        cli.ok("publish", "--to", queue, "x")
    listed(cli, queue, "available", 3)
    (claimed,) = objects(cli, "claim", queue, "--wait", "30s")
    assert objects(cli, "message", "show", claimed["handle"])[0]["state"] == "in_flight"
    assert " until 2" in cli.ok("extend", claimed["lease_token"]).out.decode()

    assert objects(cli, "queue", "purge", queue, "--yes")[0]["purged_count"] == 2

    assert counts(cli, queue) == {"in_flight": 1}
    cli.ok("ack", claimed["lease_token"])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("queue create x --default-delay 1h", "--default-delay: must be 0s to 15m"),
        ("queue create x --default-delay 1h", "max_message_delay_ms), not 1h"),
        ("publish x --delay 16m", "--delay: must be 0s to 15m (the setting max_message_delay_ms)"),
        ("queue create x --lease 13h", "--lease: must be 1s to 12h, not 13h"),
        ("queue create x --filter headers.", "--filter: line 1"),
    ],
)
def test_what_the_server_refuses_is_reported_in_the_words_of_the_options(
    cli: Cli, line: str, said: str
) -> None:
    refused = cli.run(*line.split())
    assert refused.code == 1
    assert said in refused.err


def test_a_key_makes_a_repeat_harmless(cli: Cli) -> None:
    queue, key = new_queue(cli), uuid4().hex
    (first,) = objects(cli, "publish", "--to", queue, "--dedupe-key", key, "x")
    (second,) = objects(cli, "publish", "--to", queue, "--dedupe-key", key, "x")
    assert (first["duplicate"], second["duplicate"]) == (False, True)
    assert first["message_id"] == second["message_id"]
    listed(cli, queue, "available", 1)


def test_a_queue_may_start_in_the_past_beside_another_with_its_settings(cli: Cli) -> None:
    # Given messages that were there before
    early = new_queue(cli)
    for _ in range(3):
        cli.ok("publish", "--to", early, "x")

    # When a queue starts with them
    late = f"{early}-late"
    cli.ok(
        *("queue", "create", late, "--filter", f'headers["queue"] == "{early}"'),
        *("--start-from", "-1h", "--with", early),
        *("--backoff", "linear:5s..1m", "--default-delay", "0", "--fallback-priority", "7"),
    )

    # Then it gets them, and says that this is done
    listed(cli, late, "available", 3)
    (result,) = objects(cli, "queue", "show", late)
    wait_until(lambda: objects(cli, "queue", "show", late)[0]["replay"]["done"], 60)
    assert result["backoff"]["initial_ms"] == 5000
    assert result["fallback_priority"] == 7
    shown = cli.ok("queue", "show", late).out.decode()
    assert "linear:5s..1m" in shown
    assert re.search(r"replay +done, \d+ messages", shown)

    # And its settings go back
    (changed,) = objects(cli, "queue", "update", late, "--reset", "backoff")
    assert changed["backoff"]["multiplier"] == 5
    (changed,) = objects(cli, "queue", "update", late, "--backoff", "none")
    assert changed["backoff"]["kind"] == "none"


def test_delayed_messages_are_watched_before_they_can_be_claimed(cli: Cli) -> None:
    queue = new_queue(cli, default_delay=600)
    (published,) = objects(cli, "publish", "--to", queue, "look at me")
    listed(cli, queue, "delayed", 1)

    watch = subprocess.Popen(
        [*COMMAND, "message", "watch", queue, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=cli.environ,
        text=True,
    )
    assert watch.stdout is not None
    line = watch.stdout.readline()
    watch.send_signal(signal.SIGINT)
    _, err = watch.communicate(timeout=60)

    assert published["message_id"] in line
    assert "look at me" in line
    assert watch.returncode == 130
    assert "--position" in err
