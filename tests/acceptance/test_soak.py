"""Mixed work for minutes, with the janitor's jobs: nothing grows."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.soak import KEPT_S, SERVICES, Sample, file_sizes, growth, numbered, run_soak

pytestmark = [pytest.mark.stack, pytest.mark.slow]


def sample(at_s: float, memory_mib: float = 100.0, p50_ms: float = 10.0) -> Sample:
    memory = dict.fromkeys(SERVICES, memory_mib)
    numbered = dict.fromkeys(KEPT_S, 0)
    return Sample(at_s, memory, dict.fromkeys(SERVICES, 20), 5, 1.0, numbered, 100, p50_ms, 50.0)


def test_what_is_flat_after_the_warm_up_is_passed() -> None:
    samples = [sample(n, memory_mib=min(100, 50 + 5 * n)) for n in range(60)]

    assert growth(samples) == []


@pytest.mark.parametrize(
    ("every_s", "each_mib", "found"), [(60, 1, True), (1, 1, False), (1, 5, True)]
)
def test_memory_that_grows_is_found(every_s: float, each_mib: float, found: bool) -> None:
    """In hours by little, in minutes by more: caches fill then."""
    samples = [sample(every_s * n, memory_mib=100 + each_mib * n) for n in range(60)]

    assert any(fault.startswith("memory of broker grew by") for fault in growth(samples)) is found


def test_latency_that_grows_is_found() -> None:
    samples = [sample(n, p50_ms=10 if n < 40 else 30) for n in range(60)]

    assert growth(samples) == ["latency grew from 10 to 30 ms"]


def stored(leaked_share: float, objects_an_hour: float = 0) -> list[Sample]:
    """Eight hours of a machine that commits three times as fast from the third hour on.

    WAL files are kept for 330 s, manifests for six hours, but for a share of what is written.
    """
    samples, wal, manifests = list[Sample](), 0.0, 0.0
    for number in range(961):
        at_s = 30.0 * number
        before = samples[number - 11].numbered["wal"] if number >= 11 else 0
        collected = samples[number - 720].numbered["manifest"] if number >= 720 else 0
        objects = 500 + objects_an_hour * at_s / 3600
        kept = objects + (manifests - collected) + (wal - before)
        one = sample(at_s)
        numbered = {"wal": round(wal), "manifest": round(manifests), "compactions": 0}
        files = round(kept + leaked_share * before)
        samples.append(replace(one, store_files=files, numbered=numbered))
        wal += 30 * (10 if at_s < 3 * 3600 else 30)
        manifests += 4
    return samples


def test_files_that_a_faster_machine_makes_are_no_growth() -> None:
    assert growth(stored(leaked_share=0)) == []


@pytest.mark.parametrize(
    "leak", [{"leaked_share": 0.01}, {"leaked_share": 0, "objects_an_hour": 600}]
)
def test_files_that_are_never_collected_are_found(leak: dict[str, float]) -> None:
    assert any(fault.startswith("files of the store grew by") for fault in growth(stored(**leak)))


def test_files_are_counted_by_the_numbers_of_each_database(tmp_path: Path) -> None:
    for name in ("a/wal/00012.sst", "a/wal/00011.sst", "b/wal/00003.sst", "b/wal/x.sst", "a/7.sst"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    assert numbered(file_sizes(tmp_path)) == {"wal": 15, "manifest": 0, "compactions": 0}


@pytest.mark.proof
@pytest.mark.timeout(1200)
def test_a_soak_of_three_minutes_is_flat(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"

    assert run_soak(tmp_path / "run", 180, 1, file) == []

    assert len([json.loads(line) for line in file.read_text().splitlines()]) > 50
    picture = ElementTree.fromstring(file.with_suffix(".svg").read_text())
    assert len(picture.findall(".//{http://www.w3.org/2000/svg}polyline")) == 12
