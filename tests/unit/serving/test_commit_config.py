"""The settings of commits: what they mean together, what requests cost, what a process says."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from libs.serving.process.commit_config import (
    COMMIT_INTERVAL_MS_MAX,
    CommitConfig,
    check_pace,
    pace_of,
)
from libs.serving.process.exits import EXIT_USAGE, FatalError
from libs.serving.process.store_costs import (
    EXPRESS_PRICES,
    KINDS,
    StoreCosts,
    costs_of,
)
from libs.storage.database.addresses import parse_root, parse_wal_store
from libs.storage.database.pace import INTERVAL_S_MAX, MONTH_S
from libs.storage.database.settings import Kind, tuning_of
from libs.storage.database.statistics import Statistics
from libs.storage.objects.requests import RequestCounts
from services.broker.delivery import message_cache
from services.broker.entries import editor
from services.broker.moves import targets
from services.broker.outbox import targets as outbox_targets
from services.broker.shard import replay_starts, unique_names
from services.router import backfill, brokers
from slatemq._rpc import peers, queue_locations


def config(**settings: Any) -> CommitConfig:
    return CommitConfig(root="memory:///", **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"commit_interval_ms": "100"},
        {"commit_interval_ms": "auto", "commit_budget_usd": 20},
        {"commit_interval_ms": "auto", "commit_goal_ms": 200},
    ],
)
def test_settings_that_mean_something(settings: dict[str, Any]) -> None:
    check_pace(config(**settings))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"commit_interval_ms": "soon"}, "'soon': set auto, or a whole number"),
        ({"commit_interval_ms": "-1"}, "'-1'"),
        ({"commit_interval_ms": "4001"}, "up to 4000"),
        ({"commit_interval_ms": ""}, "''"),
        ({"commit_interval_ms": "auto"}, "needs one of"),
        (
            {"commit_interval_ms": "auto", "commit_budget_usd": 1, "commit_goal_ms": 1},
            "needs one of",
        ),
        ({"commit_budget_usd": 1}, "commit_budget_usd has no effect"),
        ({"commit_interval_ms": "5", "commit_goal_ms": 1}, "commit_goal_ms has no effect"),
    ],
)
def test_settings_that_mean_nothing_are_named(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(FatalError) as raised:
        check_pace(config(**settings))
    assert raised.value.cause.code == EXIT_USAGE
    assert complaint in raised.value.cause.message


def test_a_call_that_waits_for_a_commit_of_another_process_outlasts_the_longest_interval() -> None:
    waits = [
        brokers.ASSIGN_SECONDS,
        backfill.ANSWER_SECONDS,
        editor.INVALIDATE_DEADLINE_S,
        message_cache.FETCH_DEADLINE_S,
        message_cache.REPLACE_DEADLINE_S,
        replay_starts.ASK_DEADLINE_S,
        targets.CALL_S,
        unique_names.ASK_DEADLINE_S,
        queue_locations.ANSWER_S,
        peers.ATTEMPT_S / 2,  # CreateQueue waits for a commit of this broker and of another one.
    ]
    longest_s = max(COMMIT_INTERVAL_MS_MAX / 1000, INTERVAL_S_MAX)

    assert longest_s + 1 <= min(waits)  # The commit itself takes time, too.


def test_a_broker_that_others_ask_about_queues_may_take_seconds_for_its_commit() -> None:
    for wait_s in (unique_names.ASK_DEADLINE_S, outbox_targets.ASK_DEADLINE_S):
        assert wait_s >= INTERVAL_S_MAX + 5


def test_each_store_has_its_price() -> None:
    root = parse_root("s3://data?region=us-east-1")
    fast = parse_wal_store("s3://fast--x-s3?region=us-east-1&s3_express=true", root)
    disk = parse_wal_store("file:///fast", root)

    assert costs_of("", "", root, root).wal["put"] == 5.0
    assert costs_of("put=7", "", root, root).wal["put"] == 7.0
    assert costs_of("", "", root, fast).wal == EXPRESS_PRICES
    assert costs_of("", "", root, disk).wal["put"] == 0.0
    assert costs_of("", "put=2", root, disk).wal["put"] == 2.0
    with pytest.raises(FatalError) as raised:
        costs_of("", "put:1", root, root)
    assert raised.value.cause.message.startswith(
        "wal_store_prices: 'put:1' must be a price such as"
    )


@pytest.mark.parametrize(("wal_url", "puts"), [("file:///fast", 2 / 8192), ("", 1 + 2 / 128)])
def test_a_budget_counts_the_tables_of_a_commit_also_where_its_log_costs_nothing(
    wal_url: str, puts: float
) -> None:
    address = parse_root("s3://data")
    wal_address = parse_wal_store(wal_url, address) if wal_url else address
    tuning = tuning_of(Kind.INGEST, address.scheme, wal_address.scheme)
    root: Any = SimpleNamespace(
        address=address, wal_address=wal_address, objects=SimpleNamespace(counts=RequestCounts())
    )
    database: Any = SimpleNamespace(statistics=Statistics, flush_commits=tuning.replay.commits)

    pace = pace_of(config(commit_interval_ms="auto", commit_budget_usd=20), root, database)

    assert pace.interval_s() == pytest.approx(puts * 5e-6 / (20 / MONTH_S))


def test_what_is_asked_of_both_stores_is_paid() -> None:
    free = dict.fromkeys(KINDS, 0.0)
    costs = StoreCosts(free | {"put": 5.0, "get": 0.4}, free | {"put": 1.0})
    database = Statistics(requests=Counter(put=10), wal_requests=Counter(put=1000))
    objects = RequestCounts(requests=Counter(get=100))
    assert costs.usd(database, objects) == pytest.approx((50 + 1000 + 40) / 1e6)
