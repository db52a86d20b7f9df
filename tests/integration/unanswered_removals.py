"""A store that does not answer the write that records the removal of a shard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from libs.storage.errors import StoreUnavailable
from libs.storage.objects.removed_shards import FOLDER
from libs.storage.objects.small_objects import Objects


@contextmanager
def unanswered(objects: Objects, *, is_written: bool) -> Iterator[None]:
    """Meanwhile the write fails, once it has its effect or without one."""
    put = objects.put_if_absent

    async def failing(path: str, data: bytes) -> bool:
        is_record = path.startswith(f"{FOLDER}/")
        done = await put(path, data) if is_written or not is_record else False
        if is_record:
            raise StoreUnavailable("no answer")
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "put_if_absent", failing)
        yield
