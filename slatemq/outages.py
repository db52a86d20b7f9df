"""What a stream that waits for its broker tells of it."""

from __future__ import annotations

from typing import NamedTuple

from slatemq.errors import SlateMQError


class Outage(NamedTuple):
    """That there is no stream: since when, by the monotonic clock, and why not."""

    since_s: float
    error: SlateMQError
