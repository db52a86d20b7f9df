"""The corpus of the fuzzer, replayed: every input that once reached new code, or crashed."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest

from libs.storage.layout.keys import RecordType
from libs.storage.records.catalogue import KINDS
from tests.fuzz.__main__ import CORPUS, TARGETS
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
