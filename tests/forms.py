"""Short and full forms of tests that repeat something.

`make test` and `make test-slow` have a part of it: fewer examples, and of many variants those not
marked `proof`. `make proofs` has all of it, and HYPOTHESIS_PROFILE=full has all of the examples.
Hypothesis marks its own tests; another test that calls `examples` is marked `repeated`, or `make
proofs` does not run it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Final

import pytest

FULL: Final = os.environ.get("HYPOTHESIS_PROFILE") == "full"

_PART: Final = 5
_EXAMPLES_MIN: Final = 20


def examples(full: int) -> int:
    """How many examples to try, or histories to play, of this many in the full form."""
    return full if FULL else min(full, max(_EXAMPLES_MIN, full // _PART))


def seeds(full: int, short: int = 1) -> list[Any]:
    """Seeds of random histories: this many in the full form, the first ones in the short form."""
    return [*range(short), *map(proof, range(short, full))]


def shortly(values: Iterable[Any], *short: Any) -> list[Any]:
    """Values of a parameter that repeat one proof: all in the full form, `short` in the short."""
    return [value if value in short else proof(value) for value in values]


def proof(*values: Any) -> Any:
    """Values of a parameter, or several parameters, that only the full form has."""
    return pytest.param(*values, marks=pytest.mark.proof)
