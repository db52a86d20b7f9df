"""`slatemq shard`, as people and programs use it."""

from __future__ import annotations

import pytest

from tests.integration.cli.stack import Cli

pytestmark = pytest.mark.stack


def test_shards_are_listed_with_what_they_have(cli: Cli) -> None:
    cli.ok("queue", "create", "listed", "--shard", "0")
    cli.ok("publish", "--to", "listed", "x")

    found = {(one["service"], one["shard"]): one for one in cli.ok("shard", "ls", "--json").objects}

    broker, ingest = found["broker", 0], found["ingest", 0]
    assert (broker["state"], ingest["state"]) == ("serving", "serving")
    assert broker["queues_count"] >= 1
    assert broker["database_bytes"] > 0
    assert broker["version"] == ingest["version"] != ""
    assert broker["address"] != ingest["address"] != ""
    shown = cli.ok("shard", "ls").out.decode().splitlines()
    assert shown[0].split() == [
        *("shard", "state", "queues", "messages", "bytes", "lag", "version", "address")
    ]
    assert any(line.startswith("broker 0") for line in shown)


def test_a_shard_is_drained_and_taken_back_and_not_removed_while_it_has_queues(cli: Cli) -> None:
    cli.ok("queue", "create", "stays", "--shard", "0")

    drained = cli.ok("shard", "drain", "0")
    assert "broker shard 0 is draining; it has" in drained.out.decode()
    refused = cli.run("queue", "create", "late")
    assert (refused.code, "broker shard 0 takes no new queues" in refused.err) == (1, True)
    (listed,) = [
        one for one in cli.ok("shard", "ls", "--json").objects if one["service"] == "broker"
    ]
    assert (listed["state"], "queue" in listed["note"]) == ("draining", True)
    refused = cli.run("shard", "remove", "0", "--yes")
    assert (refused.code, "broker shard 0 cannot be removed yet: " in refused.err) == (1, True)

    cli.ok("shard", "drain", "0", "--cancel")
    cli.ok("queue", "create", "late")


def test_the_only_ingest_is_not_drained(cli: Cli) -> None:
    refused = cli.run("shard", "drain", "0", "--ingest")
    assert (refused.code, "start another one first" in refused.err) == (1, True)
    assert cli.run("shard", "drain", "0", "--ingest", "--move").code == 2
    cancelled = cli.ok("shard", "drain", "0", "--ingest", "--cancel", "--json").objects
    assert [(one["ingest_shard"], one["state"]) for one in cancelled] == [(0, "serving")]


def test_the_next_numbers_are_named(cli: Cli) -> None:
    (found,) = cli.ok("shard", "add", "--json").objects
    assert found == {"next_ingest_shard": 1, "next_broker_shard": 1}
    assert "python -m services.broker --shard 1 --root" in cli.ok("shard", "add").out.decode()


def test_queues_stay_where_there_is_no_other_shard(cli: Cli) -> None:
    cli.ok("queue", "create", "alone", "--shard", "0")

    refused = cli.run("shard", "move", "alone")
    assert (refused.code, "there is no other broker shard" in refused.err) == (1, True)
    refused = cli.run("shard", "move", "alone", "--to", "5")
    assert (refused.code, "broker shard '5' does not exist" in refused.err) == (1, True)
    refused = cli.run("shard", "move", "absent", "alone", "--to", "0")
    assert (refused.code, refused.out) == (1, b"alone is on broker shard 0\n")
    refused = cli.run("shard", "drain", "0", "--move", "--cancel")
    assert (refused.code, "--cancel contradicts --move" in refused.err) == (2, True)
