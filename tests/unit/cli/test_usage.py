"""Command lines that come to nothing before any server is asked, and one that asks no one."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from slatemq.cli.app import invoke, slatemq
from slatemq.cli.failures import sentence
from slatemq.errors import Unavailable


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """An address where no one listens."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("SLATEMQ_ENDPOINT", address)
        yield address


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "queue",
        "queue create",
        "queue create q --lease 30",
        "queue create q --lease -5s",
        "queue create q --done-retention 1500ms",
        "queue create q --max-attempts many",
        "queue create q --max-attempts 0",
        "queue create q --max-attempts 65536",
        "queue create q --max-in-flight 1000001",
        "queue create q --max-attempts 99999999999",
        "queue update q",
        "queue update q --lease 1m --reset lease",
        "queue update q --reset name",
        "publish",
        "publish text --file f",
        "publish text --skip 3",
        "publish text --headers-from /a",
        "publish text --header novalue",
        "publish text --header =v",
        "publish text --header a=1 --header a=2",
        "publish text --to q --header queue=r",
        "publish text --retention 100ms",
        "publish text --created-at yesterday",
        "publish text --created-at 2026-11-21T08:30:00",
        "publish text --created-at 1969-12-31T00:00:00Z",
        "publish --file /no/such/file",
        "publish --file /",
        "publish --jsonl /no/such/file",
        "publish --jsonl /dev/null --headers-from type",
        "publish --jsonl /dev/null --headers-from /a,/b/a",
        "publish --jsonl /dev/null --headers-from /a --header a=1",
        "publish --jsonl /dev/null --headers-from /queue --to q",
        "publish --jsonl /dev/null --skip -1",
        "claim",
        "claim q --max 0",
        "claim q --wait 5",
        "ack",
        "consume q --concurrency 2",
        "consume q --wait 0s",
        "explain --size -1",
        "publish x --delay 1m --visible-at +1h",
        "status --endpoint nowhere",
        "status --endpoint http://127.0.0.1:1",
        "status --endpoint 127.0.0.1:99999",
        "status --timeout soon",
        "failed redrive q --rate -1",
        "failed redrive q --id 0",
        "queue create q --backoff linear:1s,multiplier=2",
        "task show task_foo",
        "task wait task_foo",
    ],
)
def test_wrong_usage_ends_with_2_and_says_why(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(line.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    "line",
    [
        "queue create q",
        "queue ls",
        "queue show q --json",
        "queue update q --lease 1m",
        "queue delete q --yes",
        "publish text",
        "claim q",
        "ack 0-1",
        "nack 0-1",
        "extend 0-1",
        "consume q --max 1",
        "explain",
        "status",
        "--json status",
        "failed redrive q --rate 0",
    ],
)
def test_no_server_at_the_address_ends_with_3_and_says_what_to_do(
    line: str, nowhere: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke([*line.split(), "--timeout", "100ms"]) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert nowhere in said.err
    assert "--endpoint" in said.err


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("status --token-file /no/such/file", "--token-file"),
        ("status --ca /no/such/file", "--ca"),
        ("status --cert /no/such/file --key /no/such/file", "--cert"),
        ("status --cert /no/such/file", "--key"),
        ("status --encryption-keys /no/such/file", "--encryption-keys"),
        ("status --profile no-such-profile", "--profile"),
    ],
)
def test_credentials_that_cannot_be_used_are_wrong_usage_and_name_their_option(
    line: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(line.split()) == 2
    assert f"Error: {option}: " in capsys.readouterr().err


@pytest.mark.parametrize("line", ["failed redrive q --id abc", "message show abc"])
def test_an_invalid_message_id_is_refused_with_an_example(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(line.split()) == 2
    assert "'abc' is not a valid message ID (expected a whole number" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.parametrize(
    "line",
    [
        *("failed ls", "failed show", "failed redrive", "failed purge"),
        *("message ls", "message show", "message cancel", "message reschedule", "message edit"),
        *("queue purge", "queue pause", "queue resume", "done ls"),
        "queue create --default-delay --backoff --start-from --with",
        "publish --delay --visible-at --dedupe-key",
    ],
)
def test_the_words_of_the_design_are_there(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in line.split() if not word.startswith("--")]
    assert invoke([*words, "--help"]) == 0
    said = capsys.readouterr().out
    assert f"Usage: slatemq {' '.join(words)} " in said
    for option in line.split()[len(words) :]:
        assert f"  {option} " in said


@pytest.mark.parametrize("group", ["", "queue", "message", "failed", "done", "tq"])
def test_lists_of_commands_are_reported_whole(
    group: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke([*group.split(), "--help"]) == 0
    commands = capsys.readouterr().out.partition("Commands:")[2]
    assert commands
    assert "..." not in commands.replace("ARGS...", "")


def test_lines_that_no_queue_takes_are_counted_all_the_same(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tmp_path / "f").write_bytes(b"a\nb\nc\n")

    assert invoke(["publish", "--jsonl", str(tmp_path / "f"), "--skip", "2", "--json"]) == 3
    assert json.loads(capfdbinary.readouterr().out) == {
        "durable_count": 2,
        "skipped_count": 2,
        "published_count": 0,
    }


def test_a_wrong_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLATEMQ_ENDPOINT", "somewhere")

    assert invoke(["status"]) == 2
    assert "SLATEMQ_ENDPOINT" in capsys.readouterr().err


def test_options_of_all_commands_may_stand_before_and_after(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for line in (
        "--endpoint 127.0.0.1:1 --timeout 100ms status --json",
        "--json status --endpoint 127.0.0.1:1 --timeout 100ms",
    ):
        assert invoke(line.split()) == 3
        assert json.loads(capsys.readouterr().err)["error"]["reason"] == "UNREACHABLE"


EXPLAINED_COLUMNS = 82
"""A terminal of 80 columns, and the indent that click adds."""


def every_command() -> list[tuple[str, ...]]:
    context = click.Context(slatemq)
    found: list[tuple[str, ...]] = [()]
    for name in slatemq.list_commands(context):
        found.append((name,))
        command = slatemq.get_command(context, name)
        if isinstance(command, click.Group):
            found += [(name, sub) for sub in command.list_commands(context)]
    return found


@pytest.mark.parametrize("words", every_command(), ids=" ".join)
def test_every_command_teaches_itself(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke([*words, "--help"]) == 0
    said = capsys.readouterr().out
    group = (
        bool(words)
        and len(words) == 1
        and isinstance(slatemq.get_command(click.Context(slatemq), words[0]), click.Group)
    )
    assert "--json" in said or group
    assert "slatemq " + " ".join(words) in said
    assert all(len(line) <= 100 for line in said.splitlines())
    # Examples may be longer than what explains them.
    explained = [line for line in said.splitlines() if not line.startswith("    ")]
    assert max(map(len, explained)) <= EXPLAINED_COLUMNS, max(explained, key=len)


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("nack 0-1 --error broken", "--reason"),
        ("status --token smq_a_b", "--token-file"),
        ("extend 0-1 --by 5m", "--lease"),
        ("queue create q --filtr x", "--filter"),
        ("queue remove q", "delete"),
        ("queue list", "ls"),
        ("shard rm 3", "remove"),
        ("failed get q", "show"),
        ("queue creat q", "create"),
    ],
)
def test_another_word_for_ours_is_answered_with_the_one_that_is_meant(
    line: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(line.split()) == 2
    assert capsys.readouterr().err.rstrip().endswith(f"'. Did you mean {ours!r}?")


def test_a_word_that_is_like_none_of_ours_is_answered_with_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert invoke(["claim", "q", "--visibility", "3"]) == 2
    assert capsys.readouterr().err.rstrip().endswith("No such option '--visibility'.")


@pytest.mark.parametrize("line", ["shard move q --to x", "queue create q --partitions few"])
def test_what_is_no_number_is_answered_with_its_bounds(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(line.split()) == 2
    assert "must be a whole number, " in capsys.readouterr().err


@pytest.mark.parametrize("line", ["access init", "access token", "certs dev"])
def test_what_asks_no_server_takes_no_endpoint(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke([*line.split(), "--help"]) == 0
    assert "--endpoint" not in capsys.readouterr().out


def test_a_command_that_is_misspelt_is_named_though_it_is_not_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert invoke(["cliam"]) == 2
    assert "No such command 'cliam'. Did you mean 'claim'?" in capsys.readouterr().err


def test_where_the_event_backend_is_down_the_advice_names_what_shows_it() -> None:
    down = Unavailable("redis cannot be reached yet", reason="BACKEND_DOWN")
    assert "`slatemq events status`" in sentence(down)
