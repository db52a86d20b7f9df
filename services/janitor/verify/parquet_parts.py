"""Which dead letters the parts of the archive have; loaded where pyarrow is installed."""

from __future__ import annotations

from array import array
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from libs.storage.objects.small_objects import Objects

_KEY_COLUMNS: Final = ["message_id", "failed_at"]
_KEY: Final = np.dtype([("message_id", "<i8"), ("failed_at_us", "<i8")])


class Unseen:
    """Dead letters that no part was seen to have yet."""

    def __init__(self, message_ids: array[int], failed_ms: array[int]) -> None:
        """Those of these messages, each with the time of its failure."""
        self._keys: Any = np.empty(len(message_ids), _KEY)
        self._keys["message_id"] = np.frombuffer(message_ids, "<i8")
        self._keys["failed_at_us"] = np.frombuffer(failed_ms, "<i8") * 1000

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
        found = np.empty(rows.num_rows, _KEY)
        found["message_id"] = rows["message_id"].to_numpy()
        found["failed_at_us"] = rows["failed_at"].cast(pa.int64()).to_numpy()
        self._keys = self._keys[~np.isin(self._keys, found)]

    @property
    def message_ids(self) -> list[int]:
        return sorted(self._keys["message_id"].tolist())
