"""Mixed work for minutes, with the janitor's jobs: nothing grows."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.faults.soak import SERVICES, Sample, growth, run_soak

pytestmark = [pytest.mark.stack, pytest.mark.slow]


def sample(at_s: float, memory_mib: float = 100.0, p50_ms: float = 10.0) -> Sample:
    memory = dict.fromkeys(SERVICES, memory_mib)
    return Sample(at_s, memory, dict.fromkeys(SERVICES, 20), 5, 1.0, 100, p50_ms, 50.0)


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


@pytest.mark.proof
@pytest.mark.timeout(1200)
def test_a_soak_of_three_minutes_is_flat(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"

    assert run_soak(tmp_path / "run", 180, 1, file) == []

    assert len([json.loads(line) for line in file.read_text().splitlines()]) > 50
    picture = ElementTree.fromstring(file.with_suffix(".svg").read_text())
    assert len(picture.findall(".//{http://www.w3.org/2000/svg}polyline")) == 12
