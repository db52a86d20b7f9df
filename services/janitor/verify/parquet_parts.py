"""Which dead letters the parts of the archive have; loaded where pyarrow is installed."""

from __future__ import annotations

from array import array
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from libs.storage.objects.small_objects import Objects

_KEY_COLUMNS: Final = ["message_id", "failed_at"]


class Unseen:
    """Dead letters that no part was seen to have yet, ascending by message."""

    def __init__(self, message_ids: array[int], failed_ms: array[int]) -> None:
        """Those of these messages, each with the time of its failure."""
        ids: Any = np.frombuffer(message_ids, "<i8")
        order = np.argsort(ids, kind="stable")
        self._ids = ids[order]
        self._failed_us: Any = np.frombuffer(failed_ms, "<i8")[order] * 1000
        self._is_seen: Any = np.zeros(len(order), np.bool_)

    def see(self, objects: Objects, path: str, is_whole: bool) -> None:
        """Read a part, all columns with their checksums if `is_whole`. Blocks: for a thread.

        Raises ObjectNotFound; OSError where the part is damaged, or the store is down.
        """
        columns = None if is_whole else _KEY_COLUMNS
        with objects.open(path) as file:
            try:
                part = pq.ParquetFile(file, page_checksum_verification=True)
                for group in range(part.num_row_groups):
                    self._strike(part.read_row_group(group, columns=columns))
            except (pa.ArrowException, KeyError) as error:
                raise OSError(str(error)) from error

    def _strike(self, rows: Any) -> None:
        ids = rows["message_id"].to_numpy()
        failed_us = rows["failed_at"].cast(pa.int64()).to_numpy()
        places = np.searchsorted(self._ids, ids, "left")
        ends = np.searchsorted(self._ids, ids, "right")
        # A message may have failed more than once that day.
        while (is_left := places < ends).any():
            places, ends, failed_us = places[is_left], ends[is_left], failed_us[is_left]
            self._is_seen[places[self._failed_us[places] == failed_us]] = True
            places = places + 1

    @property
    def message_ids(self) -> list[int]:
        """Of those that no part has, ascending."""
        unseen: list[int] = self._ids[~self._is_seen].tolist()
        return unseen
