"""The benchmarks are alive: in their short form every workload gives back what was put in.

`make test-slow` runs one workload, `make proofs` all of them.

The suite counts and hashes by itself, and fails where anything is missing or changed. Times are
looked at by no one here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.waterfall import __main__ as waterfall
from tests.forms import proof

REPOSITORY = Path(__file__).resolve().parents[2]
PEERS = ("redis", "postgres", "nats", "rabbitmq")

pytestmark = [pytest.mark.stack, pytest.mark.slow]  # starts stacks, and clients in processes


def short_form(folder: Path, *arguments: str) -> Any:
    """Runs the suite; gives what it wrote."""
    value = folder / "results.json"
    command = [sys.executable, "-m", "benchmarks.suite", "--short", "--json", str(value)]
    ran = subprocess.run(
        [*command, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(value.read_text(encoding="utf-8"))


COMPARED = {
    "a": 2000,
    "ar": 2000,
    "b": 2000,
    "c": 2000,
    "d": 200,
    "e500": 500,
    "e2000": 2000,
    "f": 3 * 500,
}


def test_the_waterfall_has_every_hop_of_a_single_message() -> None:
    # Given
    command = [sys.executable, "-m", "benchmarks.waterfall", "--rates", "50", "--seconds", "1"]

    # When
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)

    # Then
    assert ran.returncode == 0, ran.stdout + ran.stderr
    head, _, *rows = [line for line in ran.stdout.splitlines() if line.startswith("|")]
    assert head == "| p50, p99 in ms | 50/s |"
    took = [tuple(row.strip("| ").split(" | ")) for row in rows]
    assert [what for what, _ in took] == [
        *(what for _, what in waterfall.HOPS),
        "**publish to delivered**",
        "publish to answered",
    ]
    never_marked = [what for what, p50_p99 in took if p50_p99 == "0.00, 0.00"]
    assert never_marked == []


@pytest.mark.parametrize("workloads", ["d", proof("a,b,c,d,e,f")])
def test_what_is_compared_comes_back_whole(tmp_path: Path, workloads: str) -> None:
    # When
    result = short_form(tmp_path, "--systems", "slatemq", "--workloads", workloads)

    # Then
    counted = {workload: by_system["slatemq"] for workload, by_system in result["counted"].items()}
    assert counted == ({"d": COMPARED["d"]} if workloads == "d" else COMPARED)
    assert result["failures"] == []


@pytest.mark.proof
def test_a_commit_runs_beside_this_checkout_and_is_compared_with_it() -> None:
    # When
    command = [sys.executable, "-m", "benchmarks.paired", "HEAD", "--short", "--workloads", "d"]
    ran = subprocess.run(
        [*command, "--rounds", "3"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )

    # Then
    assert ran.returncode == 0, ran.stdout + ran.stderr
    first, *_, last = ran.stdout.splitlines()
    assert first.split()[:2] == ["d", "singles/s"]
    assert last.split()[:4] == ["d", "together", "processor", "ms"]
    assert all(" beside " in line and ", quartiles " in line for line in (first, last))


@pytest.mark.proof
def test_backlogs_and_starts_give_each_message_once(tmp_path: Path) -> None:
    # When
    result = short_form(tmp_path, "--systems", "slatemq", "--workloads", "g,limits")

    # Then: two rounds at each of two sizes, and first claims after two starts; with delayed ones
    # beside them as well
    assert result["counted"]["g"]["slatemq"] == 2 * (2 * 2 * 1000 + 2 * 100)
    assert {"g", "limits"} == result["numbers"].keys()
    assert result["failures"] == []


@pytest.mark.proof
def test_what_is_routed_and_written_comes_back_whole(tmp_path: Path) -> None:
    # When
    result = short_form(tmp_path, "--systems", "slatemq", "--workloads", "h,i1024,i1024r,icost")

    # Then: what warms up, then the same for all queues and for ten; a point of the curve
    counted = {workload: by_system["slatemq"] for workload, by_system in result["counted"].items()}
    assert counted == {"h": 1000 + 2 * 3 * 1000, "i1024": 5000, "i1024r": 5000, "icost": 200 * 2}
    assert result["failures"] == []


@pytest.mark.proof
def test_what_is_published_as_tasks_comes_back_whole(tmp_path: Path) -> None:
    # When
    result = short_form(tmp_path, "--systems", "slatemq", "--workloads", "k")

    # Then a turn of bare Redis and one of async on it, whose messages were all there
    settings = result["chosen"]["k"]["slatemq"]
    if "left out" in settings:  # without Redis
        assert {*settings["left out"]} == {"redis streams"}
        return
    assert {what.rsplit(", ", 2)[0] for what in result["numbers"]["k"]} == {
        "file://, bare redis streams",
        "file://, bare redis streams, beside commits",
        "file://, async on redis streams",
    }
    assert result["counted"]["k"]["slatemq"] > 0
    assert result["failures"] == []


@pytest.mark.proof
def test_what_the_peers_are_given_comes_back_whole(tmp_path: Path) -> None:
    # When
    result = short_form(tmp_path, "--systems", ",".join(PEERS), "--workloads", "a,f")

    # Then each peer gave it all back, or says why it could not be had
    assert {*result["settings"], *result["left_out"]} == {*PEERS}
    assert all(result["left_out"].values())
    for workload, count in (("a", 2000), ("f", 3 * 500)):
        assert result["counted"].get(workload, {}) == dict.fromkeys(result["settings"], count)
