"""The wanted dead letters of a part of the archive, read by PyArrow alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from libs.storage.errors import ObjectNotFound
from libs.storage.objects.small_objects import Objects
from services.janitor.jobs.archive import KEY, KEY_COLUMNS, day_path, is_part, keys_of

__all__ = ["UNREADABLE", "day_path", "dead_letters_of", "is_part"]

UNREADABLE: Final = (ObjectNotFound, OSError, pa.ArrowException)
"""What reading a part raises that is not there any more, or changes, or is damaged."""

SOME: Final = 1_000
"""Dead letters that become Python objects together."""


def dead_letters_of(
    objects: Objects, path: str, wanted: Collection[tuple[int, int]]
) -> Iterator[list[dict[str, Any]]]:
    """The wanted dead letters of a part, some at a time. Blocks: for a thread.

    `wanted` names them by message and failure in ms. Raises the errors of UNREADABLE.
    """
    keys = np.array([(message_id, failed_ms * 1000) for message_id, failed_ms in wanted], KEY)
    with objects.open(path) as file:
        part = pq.ParquetFile(file)
        for group in range(part.num_row_groups):
            there = np.isin(keys_of(part.read_row_group(group, columns=KEY_COLUMNS)), keys)
            if not there.any():
                continue
            chosen = part.read_row_group(group).filter(pa.array(there))
            for start in range(0, chosen.num_rows, SOME):
                yield chosen.slice(start, SOME).to_pylist()
