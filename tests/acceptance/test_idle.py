"""What an instance asks of a paid store while nothing happens: a new poll fails here.

Counted by interval: each process may look at its entry of the topology, routers at its changes
too, and SlateDB at its manifests. Nothing else asks for anything.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.suite import costs, servers
from libs.serving.process.ownership import CHECK_S
from libs.serving.process.store_costs import LIST_PRICES
from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind, tuning_of
from libs.storage.database.slate import Batch
from tests.simulation.idle import IDLE_S

PRICED_AS = {"POST": "put"}
"""A POST, by which the collectors delete many objects at once, costs what a PUT does."""

LOOKS = IDLE_S / (0.75 * CHECK_S)
"""Looks at an entry in the simulated time, at most: each comes after 0.75 to 1.25 of `CHECK_S`."""

FASTER = 100
"""SlateDB's polls are counted at so many times their pace."""

MONTH_S = 30 * 86_400

COLLECTED_S = 1260
"""Longer than the interval of the collectors."""

POLLS = (
    "manifest_poll_interval",
    "compactor_options.poll_interval",
    "compactor_options.worker.compactions_poll_interval",
)
GETS_A_POLL = 8
"""What all three ask for together: the manifest for the writer and for the compactor, the
compactions for the compactor and for its worker, and the boundary of each."""

GETS_A_COLLECTION, LISTS_A_COLLECTION = 14, 4
"""What the four collectors ask for together, where there is nothing to collect."""

COLLECTORS = tuple(
    f"garbage_collector_options.{kind}_options.interval"
    for kind in ("wal", "compacted", "manifest", "compactions")
)


def test_processes_look_at_the_topology_and_at_nothing_else() -> None:
    program = [sys.executable, "-m", "tests.simulation.idle"]
    environ = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(program, check=True, stdout=subprocess.PIPE, env=environ)
    found = json.loads(done.stdout)
    everything = found.pop("store")["all"]
    for process, requests in found.items():
        looks = 2 if process.startswith("router") else 1
        assert 0 < requests.pop("get") <= looks * LOOKS, process
        assert not any(requests.values()), (process, requests)
    assert everything <= 4 * LOOKS


def _seconds(text: object) -> float:
    assert isinstance(text, str)
    assert text.endswith("s")
    return float(text.removesuffix("s"))


@pytest.mark.usefixtures("watched_openings")
async def test_slatedb_polls_as_often_as_its_settings_say(tmp_path: Path) -> None:
    # Given a database with the settings of paid stores, whose time runs faster
    paid = tuning_of(Kind.BROKER, "s3")
    polls = {name: _seconds(paid.settings[name]) / FASTER for name in (*POLLS, *COLLECTORS)}
    quick = {name: f"{int(1000 * seconds)}ms" for name, seconds in polls.items()}
    tuning = replace(paid, settings={**paid.settings, **quick})
    database = await open_root(tmp_path.as_uri()).database("broker/0", Kind.BROKER, tuning)
    batch = Batch()
    batch.put(b"\x01k", b"v")
    await database.commit(batch)
    await database.flush_memtable()

    # When nothing happens for some polls
    began_s, before = time.monotonic(), database.statistics().requests
    await asyncio.sleep(5)
    found, took_s = database.statistics().requests - before, time.monotonic() - began_s
    await database.close()

    # Then each poll has made the requests that it is known for, and there are no others
    rounds = took_s / polls["manifest_poll_interval"] + 1
    collections = took_s / polls[COLLECTORS[0]] + 1
    assert len(set(polls.values())) == 2
    allowed = {
        "get": rounds * GETS_A_POLL + collections * GETS_A_COLLECTION,
        "list": collections * LISTS_A_COLLECTION,
    }
    assert found["get"] > 0
    assert all(count <= allowed.get(kind, 0) for kind, count in found.items()), (found, allowed)


@pytest.mark.proof
@pytest.mark.slow
def test_an_idle_instance_asks_once_a_second_at_most_and_costs_less_than_a_dollar(
    tmp_path: Path,
) -> None:
    # Given all processes of an instance on an S3 server that counts, settled
    with (
        costs.counting_store(tmp_path) as port,
        servers.slatemq(tmp_path, costs.CREDENTIALS, costs.store_url(port)),
    ):
        time.sleep(costs.SETTLE_S)
        before, began_s = costs.counts(port), time.monotonic()
        time.sleep(COLLECTED_S)
        after, took_s = costs.counts(port), time.monotonic() - began_s

    # Then
    found = {name: count - before.get(name, [0, 0])[0] for name, (count, _) in after.items()}
    requests = Counter[str]()
    for name, count in found.items():
        requests[PRICED_AS.get(method := name.split()[0], method.lower())] += count
    assert requests.total() < took_s
    a_month = MONTH_S / took_s
    assert sum(LIST_PRICES[kind] * count for kind, count in requests.items()) / 1e6 * a_month < 1
