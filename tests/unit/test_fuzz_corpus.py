"""The corpus of the fuzzer, replayed: every input that once reached new code, or crashed."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from libs.storage.layout.keys import RecordType
from libs.storage.records.catalogue import KINDS
from tests.fuzz.__main__ import CORPUS, CORPUS_BYTES_MAX, INPUTS_MAX, TARGETS, _keep
from tests.fuzz.records import ENCODERS, SEVERAL_FORMS
from tests.fuzz.targets import TARGETS as FUNCTIONS

MUTATIONS = 6
"""Of each input: bits flipped, ends cut, two inputs spliced."""


@pytest.fixture(autouse=True)
def _without_logs() -> Iterator[None]:
    """Without the logs of what is refused, which take most of the time."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("target", TARGETS)
def test_inputs_are_taken_or_refused_and_never_crash(target: str) -> None:
    inputs = sorted((CORPUS / target).iterdir())
    assert inputs, "the corpus of each target has seeds"
    for path in inputs:
        FUNCTIONS[target](path.read_bytes())


@pytest.mark.parametrize("target", TARGETS)
def test_inputs_that_are_damaged_are_taken_or_refused_and_never_crash(target: str) -> None:
    contents = [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]
    chance = random.Random(target)
    for content in contents:
        for _ in range(MUTATIONS if content else 0):
            damaged = bytearray(content)
            for _ in range(chance.randrange(1, 4)):
                damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
            cut = bytes(damaged[: chance.randrange(1, len(damaged) + 1)])
            other = chance.choice(contents)
            for one in (bytes(damaged), cut, cut + other[chance.randrange(len(other) + 1) :]):
                FUNCTIONS[target](one)


def test_every_target_that_is_named_is_one_that_can_run() -> None:
    assert list(TARGETS) == list(FUNCTIONS)


def test_every_kind_of_record_is_encoded_again() -> None:
    assert set(ENCODERS) == set(KINDS) == set(RecordType)
    assert set(SEVERAL_FORMS) < set(ENCODERS)


def test_a_corpus_keeps_what_has_a_name_and_of_the_merged_inputs_the_smallest(
    tmp_path: Path,
) -> None:
    (tmp_path / "found-by-hand").write_bytes(b"named")
    (tmp_path / ("0" * 40)).write_bytes(b"superfluous")

    _keep(tmp_path, [b"named", b"large" * CORPUS_BYTES_MAX, b"a", b"bc"])

    assert (tmp_path / "found-by-hand").exists()
    assert sorted(path.read_bytes() for path in tmp_path.iterdir()) == [b"a", b"bc", b"named"]

    _keep(tmp_path, [b"%d" % number for number in range(INPUTS_MAX + 100)])

    assert len(list(tmp_path.iterdir())) == INPUTS_MAX + 1


def test_the_corpus_is_small() -> None:
    sizes = [path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()]
    assert sum(sizes) < 512 << 10
