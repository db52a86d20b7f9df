"""A message that cannot be decrypted, among others that can: it holds up none of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from slatemq._secrets import KEY_HEADER
from slatemq.encryption import KeyRing, new_key
from tests.acceptance.local_stack import wait_until
from tests.integration.cli.queue_file_calls import counts, new_queue
from tests.integration.cli.stack import Cli

pytestmark = pytest.mark.stack

WHY = "the payload was not encrypted with the key '2026', or was changed"
GOOD = ("one", "two")


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, str]:
    file = tmp_path / "keys"
    file.write_text(f"2026 {new_key()}\n")
    file.chmod(0o600)
    return "--encryption-keys", str(file)


def publish(cli: Cli, keys: tuple[str, str], queue: str) -> None:
    """A plain text that says it is encrypted, and then others that are."""
    ring = KeyRing.from_file(keys[1])
    cli.client.publish(b"plain", {"queue": queue, KEY_HEADER: "2026"})
    for text in GOOD:
        cli.client.publish(*ring.seal(text.encode(), {"queue": queue}))
    wait_until(lambda: counts(cli, queue) == {"available": 3}, 60)


@pytest.mark.parametrize(
    ("command", "out"),
    [((), b"one\ntwo\n"), (("--exec", "cat; echo"), b"one\ntwo\n")],
    ids=["printed", "run"],
)
def test_consume_nacks_it_until_it_is_a_dead_letter(
    cli: Cli, keys: tuple[str, str], command: tuple[str, ...], out: bytes
) -> None:
    queue = new_queue(cli, max_attempts=2)
    publish(cli, keys, queue)

    done = cli.ok(*keys, "consume", queue, *command, "--max", "4")

    assert (done.out, done.err.count(WHY)) == (out, 2), done
    wait_until(lambda: counts(cli, queue) == {"done": 2, "failed": 1}, 60)
    (dead_letter,) = cli.client.list_entries(queue, "failed")
    assert dead_letter.reason.endswith(WHY)


@pytest.mark.parametrize("command", [(), ("--exec", "cat; echo")], ids=["printed", "run"])
def test_consume_with_an_old_file_of_keys_ends_and_counts_no_attempt(
    cli: Cli, keys: tuple[str, str], command: tuple[str, ...]
) -> None:
    queue, ring = new_queue(cli, max_attempts=1), KeyRing({"2027": new_key()}, "2027")
    for text in ("1", "2", "3", "4"):
        cli.client.publish(*ring.seal(text.encode(), {"queue": queue}))
    wait_until(lambda: counts(cli, queue) == {"available": 4}, 60)

    done = cli.run(*keys, "consume", queue, *command, "--wait", "60s")

    assert (done.code, done.out) == (2, b""), done
    assert "the key ring has no key '2027'" in done.err
    wait_until(lambda: counts(cli, queue) == {"available": 4}, 60)
    assert {one.attempts_count for one in cli.client.list_entries(queue, "available")} == {0}


@pytest.mark.parametrize("first", ["decrypted", "none"])
def test_consume_nacks_few_messages_of_unknown_keys_and_those_after_one_that_it_decrypts(
    cli: Cli, keys: tuple[str, str], first: str
) -> None:
    queue, ring = new_queue(cli, max_attempts=1), KeyRing({"2027": new_key()}, "2027")
    after = {"done": 1, "failed": 3} if first == "decrypted" else {"failed": 2}
    if first == "decrypted":
        cli.client.publish(*KeyRing.from_file(keys[1]).seal(b"one", {"queue": queue}))
        wait_until(lambda: counts(cli, queue) == {"available": 1}, 60)
    for _ in range(after["failed"]):
        cli.client.publish(*ring.seal(b"x", {"queue": queue}))
    wait_until(lambda: counts(cli, queue) == {"available": sum(after.values())}, 60)

    done = cli.run(*keys, "consume", queue, "--max", str(sum(after.values())))

    assert done.err.count("the key ring has no key '2027'") == after["failed"], done
    wait_until(lambda: counts(cli, queue) == after, 60)


def test_claim_shows_it_as_it_is_stored_with_its_lease(cli: Cli, keys: tuple[str, str]) -> None:
    queue = new_queue(cli)
    publish(cli, keys, queue)

    done = cli.ok(*keys, "--json", "claim", queue, "--max", "3", "--wait", "30s")

    assert [one["payload"] for one in done.objects] == ["plain", *GOOD]
    assert [one.get("not_decrypted", "").endswith(WHY) for one in done.objects] == [
        True,
        False,
        False,
    ]
    assert done.err.count(WHY) == 1
    cli.ok("ack", *(one["lease_token"] for one in done.objects))


@pytest.mark.parametrize("act", ["export", "failed edit"])
def test_files_have_it_as_it_is_stored(
    cli: Cli, keys: tuple[str, str], tmp_path: Path, act: str
) -> None:
    queue, file = new_queue(cli, max_attempts=1), tmp_path / "f.tq"
    publish(cli, keys, queue)
    for one in cli.client.claim(queue, 3, wait=60):
        one.nack("broken")
    wait_until(lambda: counts(cli, queue) == {"failed": 3}, 60)

    if act == "export":
        done = cli.ok(*keys, "--json", "export", queue, "--state", "failed", "--out", str(file))
        (fields,) = done.objects
        assert (fields["exported_count"], fields["not_decrypted_count"]) == (3, 1)
    else:
        done = cli.run(
            *keys, "failed", "edit", queue, environ={"VISUAL": f"f() {{ cp $1 {file}; }}; f"}
        )
        assert done.code == 0, done

    assert "are in the file as they are stored: 1; " in done.err
    text = file.read_text()
    assert (text.count("!plain\n"), text.count("!one\n"), text.count("!two\n")) == (1, 1, 1)
    assert f"{WHY}\n" in text


def test_shown_alone_it_is_as_it_is_stored(cli: Cli, keys: tuple[str, str]) -> None:
    queue = new_queue(cli)
    publish(cli, keys, queue)
    entry = next(iter(cli.client.list_entries(queue, "available")))

    done = cli.ok(*keys, "message", "show", entry.handle)

    assert b"  payload  plain\n" in done.out
    assert WHY in done.err
