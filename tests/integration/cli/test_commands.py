"""Each command against a real stack: what it prints, its JSON, its exit code."""

from __future__ import annotations

import base64
import os
import signal
from pathlib import Path

import pytest

from slatemq import OutgoingMessage
from tests.acceptance.local_stack import wait_until
from tests.integration.cli.stack import COMMAND, Cli, Result

pytestmark = pytest.mark.stack


@pytest.fixture
def queue(cli: Cli) -> str:
    """A queue that takes what is published --to it."""
    return cli.create()


def claim(cli: Cli, queue: str, *arguments: str) -> Result:
    return cli.ok("claim", queue, "--wait", "10s", "--json", *arguments)


# --- Queues -----------------------------------------------------------------


def test_a_queue_is_created_shown_changed_and_deleted(cli: Cli) -> None:
    # When a queue is created with settings of its own
    made = cli.ok(
        *("queue", "create", "life", "--filter", 'headers["type"] == "x"', "--priority", "7"),
        *("--max-attempts", "3", "--lease", "1m30s", "--done-retention", "2d", "--json"),
    ).objects[0]

    # Then it has them
    assert made["queue_id"] == "life"
    assert made["lease_ms"] == 90_000
    assert made["done_retention_s"] == 172_800
    assert made["max_attempts"] == 3

    # When one is changed and another goes back to its default
    changed = cli.ok(
        *("queue", "update", "life", "--max-attempts", "9", "--reset", "lease", "--json"),
        *("--etag", made["etag"]),
    ).objects[0]

    # Then the others stay
    assert (changed["max_attempts"], changed["lease_ms"]) == (9, 30_000)
    assert changed["filter"] == made["filter"]
    assert b"life" in cli.ok("queue", "show", "life").out

    # And an etag of before is refused
    stale = cli.run("queue", "update", "life", "--lease", "1m", "--etag", made["etag"])
    assert stale.code == 1
    assert changed["etag"] in stale.err

    # When it is deleted, then it is gone
    cli.ok("queue", "delete", "life")
    assert cli.run("queue", "show", "life").code == 1


def test_queues_are_listed_one_object_per_line(cli: Cli) -> None:
    for name in ("list-a", "list-b"):
        cli.ok("queue", "create", name)

    listed = cli.ok("queue", "ls", "--prefix", "list-", "--json")

    assert [one["queue_id"] for one in listed.objects] == ["list-a", "list-b"]
    assert listed.objects[0]["counts"] == {
        "available_count": 0,
        "delayed_count": 0,
        "in_flight_count": 0,
        "done_count": 0,
        "failed_count": 0,
        "archived_count": 0,
        "by_priority": {},
        "oldest_claimable_age_ms": None,
    }


def test_a_long_filter_is_reported_in_full_into_a_pipe(cli: Cli) -> None:
    terms = " || ".join(f'headers["type"] == "number {n}"' for n in range(30))
    cli.ok("queue", "create", "long-filter", "--filter", terms)

    assert terms.encode() in cli.ok("queue", "ls", "--prefix", "long-filter").out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("queue", "create", "no spaces"), "queue_id"),
        (("queue", "create", "bad", "--filter", "headers["), "filter"),
        (("queue", "create", "bad", "--lease", "1ms"), "--lease: must be 1s to 12h, not 1ms"),
        (("queue", "show", "nowhere"), "queue ls"),
        (("queue", "delete", "nowhere"), "does not exist"),
        (("queue", "update", "nowhere", "--lease", "1m"), "does not exist"),
        (("claim", "nowhere"), "does not exist"),
        (("consume", "nowhere"), "does not exist"),
        (("explain", "--queue", "nowhere"), "does not exist"),
        (("publish", "x", "--header", "a=" + "x" * 65_536), "headers"),
    ],
)
def test_what_the_server_refuses_ends_with_1(
    cli: Cli, arguments: tuple[str, ...], said: str
) -> None:
    refused = cli.run(*arguments)

    assert refused.code == 1
    assert refused.out == b""
    assert said in refused.err


def test_an_error_for_programs_has_its_reason(cli: Cli, queue: str) -> None:
    refused = cli.run("queue", "create", queue, "--json")

    assert '"reason": "QUEUE_ALREADY_EXISTS"' in refused.err


# --- Messages ---------------------------------------------------------------


@pytest.mark.parametrize("payload", [b"", b"text\r\n\x00", "\u2028é".encode(), b"\xff\xfe\n"])
def test_a_payload_comes_out_as_it_went_in(cli: Cli, queue: str, payload: bytes) -> None:
    # Given a message from stdin, with headers and a time of its own
    published = cli.ok(
        *("publish", "--to", queue, "--header", "a=b=c", "--header", "empty=", "--retention", "1h"),
        *("--created-at", "2026-11-21T08:30:00Z", "--json", "-"),
        stdin=payload,
    ).objects

    # When it is claimed
    (got,) = claim(cli, queue, "--consumer", "me").objects

    # Then it is the same
    b64decode = base64.b64decode(got["payload_base64"]) if "payload_base64" in got else None
    assert (b64decode if b64decode is not None else got["payload"].encode()) == payload
    assert ("payload" in got) == (payload != b"\xff\xfe\n")
    assert [one["message_id"] for one in published] == [got["message_id"]]
    assert [one["received_at_ms"] for one in published] == [got["received_at_ms"]]
    assert got["headers"] == {"queue": queue, "a": "b=c", "empty": ""}
    assert got["created_at_ms"] == 1_795_249_800_000
    assert got["retention_s"] == 3600
    assert got["attempts_count"] == 1
    assert set(got) - {"payload", "payload_base64"} == {
        *("message_id", "handle", "headers", "created_at_ms", "received_at_ms", "retention_s"),
        *("lease_token", "lease_deadline_ms", "attempts_count", "priority"),
    }


def test_text_and_files_are_published_as_their_bytes(cli: Cli, queue: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\x00\xfffile")

    cli.ok("publish", "--to", queue, b"\xffargument")
    cli.ok("publish", "--to", queue, "--file", str(tmp_path / "f"))

    assert cli.ok("consume", queue, "--max", "2").out == b"\xffargument\n\x00\xfffile\n"


def test_a_large_payload_goes_through(cli: Cli, queue: str) -> None:
    payload = os.urandom(5_000_000).replace(b"\n", b"-")

    cli.ok("publish", "--to", queue, "--file", "-", stdin=payload)

    assert cli.ok("consume", queue, "--max", "1").out == payload + b"\n"


def test_leases_are_finished_by_hand_and_each_is_answered(cli: Cli, queue: str) -> None:
    # Given three messages under leases
    for text in "abc":
        cli.ok("publish", "--to", queue, text)
    wait_until(lambda: cli.counts(queue)["available_count"] == 3, 60)
    claimed = claim(cli, queue, "--max", "3", "--lease", "1m").objects
    tokens = [one["lease_token"] for one in claimed]

    # When one is extended, one acked, one given back for later
    extended = cli.ok("extend", tokens[0], "--lease", "10m", "--json").objects[0]
    cli.ok("ack", tokens[1])
    cli.ok("nack", tokens[2], "--reason", "later", "--delay", "1h")

    # Then that is how they are
    assert extended["lease_deadline_ms"] > claimed[0]["lease_deadline_ms"] + 500_000
    counts = cli.counts(queue)
    assert (counts["in_flight_count"], counts["done_count"], counts["delayed_count"]) == (1, 1, 1)

    # And one refused among others is reported, and makes the exit code
    mixed = cli.run("ack", tokens[0], tokens[2], "no-token", "--json")
    assert mixed.code == 1
    assert [one["ok"] for one in mixed.objects] == [True, False, False]
    assert mixed.objects[1]["error"]["reason"] == "LEASE_ENDED"


def test_an_empty_queue_is_no_error(cli: Cli, queue: str) -> None:
    nothing = cli.ok("claim", queue)

    assert nothing.out == b""
    assert queue in nothing.err


def test_a_message_is_explained_before_it_is_published(cli: Cli, queue: str) -> None:
    objects = cli.ok("explain", "--to", queue, "--json").objects
    other = cli.ok("explain", "--to", "other", "--queue", queue, "--json").objects

    assert [one["queue_id"] for one in objects if one["matched"]] == [queue]
    assert [(one["queue_id"], one["matched"]) for one in other] == [(queue, False)]
    assert b"yes" in cli.ok("explain", "--to", queue).out


def test_an_expression_is_tried_before_a_queue_has_it(cli: Cli) -> None:
    tried = ("explain", "--header", "rank=7", "--filter", "has(headers.rank)")

    assert cli.ok(*tried, "--priority", "int(headers.rank)").out == b"matches with priority 7\n"
    assert cli.ok("explain", "--filter", "has(headers.rank)").out == b"does not match\n"
    assert "slatemq: --filter: line 1" in cli.run("explain", "--filter", "headers.rank ==").err
    late = cli.run("queue", "create", "late", "--start-from", "3000-01-01T00:00:00Z")
    assert late.err.startswith("slatemq: --start-from: must not lie in the future")
    assert cli.run(*tried, "--queue", "any").code == 2


def test_the_status_names_every_service(cli: Cli, queue: str) -> None:
    cli.ok("publish", "--to", queue, "x")
    wait_until(lambda: cli.counts(queue)["available_count"] == 1, 60)

    result = cli.status("--check")

    assert {(one["service"], one["shard"], one["serving"]) for one in result["services"]} == {
        ("ingest", 0, True),
        ("router", 0, True),
        ("broker", 0, True),
        ("janitor", 0, True),
    }
    assert result["routes"][0]["cursor"].isdigit()
    depths = {one["queue_id"]: one["counts"]["available_count"] for one in result["queues"]}
    assert depths[queue] == 1
    assert b"serving" in cli.ok("status").out


def test_a_lease_that_is_longer_than_the_queue_allows_is_reported(cli: Cli, queue: str) -> None:
    for text in ("a", "b"):
        cli.ok("publish", "--to", queue, text)

    long = cli.ok("claim", queue, "--lease", "13h", "--wait", "30s", "--json")
    short = cli.ok("claim", queue, "--lease", "12h", "--wait", "30s", "--json")

    assert f"leases of {queue} are at most 12h" in long.err
    assert len(long.objects) == len(short.objects) == 1
    assert short.err == ""


# --- Consuming --------------------------------------------------------------


def test_a_program_acks_with_its_exit_status(cli: Cli, queue: str, tmp_path: Path) -> None:
    # Given messages that a program takes at the second attempt only
    for text in ("a", "b", "c"):
        cli.ok("publish", "--to", queue, "--header", "h=v", text)
    seen = tmp_path / "seen"
    program = (
        f'cat >> {seen}; echo " $SLATEMQ_ATTEMPTS $SLATEMQ_QUEUE $SLATEMQ_HEADERS" >> {seen};'
        ' test "$SLATEMQ_ATTEMPTS" = 2'
    )

    # When they are consumed until each has come twice
    limits = ("--max", "6", "--wait", "60s")
    done = cli.ok("consume", queue, "--exec", program, *limits, "--json")

    # Then each was given back once, and acked then
    results = [(one["attempts_count"], one["result"]) for one in done.objects]
    assert sorted(results) == [(1, "nacked")] * 3 + [(2, "acked")] * 3
    assert cli.counts(queue)["done_count"] == 3
    lines = sorted(seen.read_text().splitlines())
    assert [line.split()[:3] for line in lines] == [
        [text, attempt, queue] for text in "abc" for attempt in "12"
    ]
    assert '"h": "v"' in lines[0]


def test_a_program_that_reads_nothing_or_is_killed_does_no_harm(cli: Cli, queue: str) -> None:
    cli.ok("publish", "--to", queue, "--file", "-", stdin=b"x" * 1_000_000)
    assert "1 acked" in cli.ok("consume", queue, "--exec", "true", "--max", "1").err

    cli.ok("publish", "--to", queue, "x")
    assert "signal 9" in cli.run("consume", queue, "--exec", "kill -9 $$", "--max", "1").err


def test_programs_run_side_by_side(cli: Cli, queue: str, tmp_path: Path) -> None:
    # Given two messages, each of whose programs waits for the other's
    for text in ("a", "b"):
        cli.ok("publish", "--to", queue, text)
    program = (
        f"t=$(cat); touch {tmp_path}/$t; n=0;"
        f" until [ -e {tmp_path}/a -a -e {tmp_path}/b ]; do sleep 0.05; n=$((n+1));"
        " [ $n -lt 200 ] || exit 1; done"
    )

    done = cli.ok("consume", queue, "--exec", program, "--concurrency", "2", "--max", "2")

    assert "2 acked, 0 nacked" in done.err


def test_ctrl_c_gives_back_what_is_in_work_and_counts_no_attempt(
    cli: Cli, queue: str, tmp_path: Path
) -> None:
    # Given a program at work
    cli.ok("publish", "--to", queue, "x")
    consumer = cli.start("consume", queue, "--exec", f"echo $$ > {tmp_path}/pid; sleep 100")
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), 60)

    # When Ctrl-C comes
    consumer.send_signal(signal.SIGINT)
    _, err = consumer.communicate(timeout=60)

    # Then the command and its program end, and the message is there as if nothing had been
    assert consumer.returncode == 130
    assert b"Traceback" not in err
    assert claim(cli, queue).objects[0]["attempts_count"] == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_reader_that_goes_away_ends_it_quietly(cli: Cli, queue: str) -> None:
    # Given more messages than the reader takes
    lines = b"".join(b"%d %s\n" % (n, b"x" * 10_000) for n in range(200))
    cli.ok("publish", "--to", queue, "--jsonl", "-", stdin=lines)
    wait_until(lambda: cli.counts(queue)["available_count"] == 200, 60)
    consumer = cli.start("consume", queue)
    assert consumer.stdout is not None
    consumer.stdout.read(10)

    # When the reader goes away
    consumer.stdout.close()
    assert consumer.stdin is not None
    consumer.stdin.close()
    assert consumer.stderr is not None
    err = consumer.stderr.read()
    code = consumer.wait(timeout=60)
    consumer.stderr.close()

    # Then it ends without a word, and no message is lost or failed
    assert code == 141
    assert b"Traceback" not in err
    counts = cli.counts(queue)
    assert counts["failed_count"] == 0
    assert counts["done_count"] < 200
    assert sum(counts.values()) == 200


def test_a_reader_that_goes_away_from_a_program_costs_no_message_an_attempt(
    cli: Cli, queue: str
) -> None:
    # Given a program that writes more messages than the reader takes
    for text in ("a", "b", "c"):
        cli.ok("publish", "--to", queue, text)
    wait_until(lambda: cli.counts(queue)["available_count"] == 3, 60)
    consumer = cli.start("consume", queue, "--exec", "cat; echo", "--wait", "60s")
    assert consumer.stdout is not None

    # When the reader goes away
    consumer.stdout.close()
    consumer.stdout = None
    _, err = consumer.communicate(timeout=50)

    # Then it ends, and the messages are there as if nothing had been
    assert (consumer.returncode, b"0 acked, 0 nacked" in err) == (141, True), err
    assert cli.counts(queue)["done_count"] == 0
    waiting = cli.ok("message", "ls", queue, "--json").objects
    assert [one["attempts_count"] for one in waiting] == [0, 0, 0]


def test_a_program_that_ends_by_sigpipe_of_its_own_is_a_failure_like_others(
    cli: Cli, queue: str
) -> None:
    cli.ok("publish", "--to", queue, "x")

    done = cli.run("consume", queue, "--exec", "kill -PIPE $$", "--max", "1")

    assert (done.code, "signal 13" in done.err) == (1, True), done.err


def test_messages_come_for_programs_as_claim_shows_them(cli: Cli, queue: str) -> None:
    cli.ok("publish", "--to", queue, "x")

    (result,) = cli.ok("consume", queue, "--max", "1", "--json").objects

    assert result["payload"] == "x"
    assert result["headers"] == {"queue": queue}


def test_the_command_is_the_one_of_the_package() -> None:
    assert COMMAND[1:] == ("-m", "slatemq.cli")


def test_consume_says_that_its_queue_is_paused(cli: Cli) -> None:
    cli.ok("queue", "create", "at-rest")
    cli.ok("queue", "pause", "at-rest")
    result = cli.ok("consume", "at-rest", "--wait", "10s")
    assert result.out == b""
    assert result.err.count("at-rest is paused: waiting until `slatemq queue resume at-rest`") == 1
    # And nothing where it is not
    cli.ok("queue", "resume", "at-rest")
    assert cli.ok("consume", "at-rest", "--wait", "1s").err == ""


def test_claim_gives_back_what_its_reader_does_not_take(cli: Cli, queue: str) -> None:
    # Given more messages than a pipe holds, each of which fits into it
    count, held_max = 400, 100
    cli.client.publish_many([OutgoingMessage(bytes(4000), {"queue": queue})] * count)
    wait_until(lambda: cli.counts(queue)["available_count"] == count, 60)

    # When the reader of a claim leaves after the first one
    with cli.start("claim", queue, "--max", str(count), "--json") as claiming:
        assert claiming.stdout is not None
        claiming.stdout.readline()
        claiming.stdout.close()
        assert claiming.wait(60) == 141

    # Then the rest is available
    counts = cli.counts(queue)
    assert 0 < counts["in_flight_count"] < held_max
    assert counts["in_flight_count"] + counts["available_count"] == count
