"""Tasks of a group that fail for one reason raise one error, by every Python 3.11."""

from __future__ import annotations

import asyncio

import pytest

from libs.storage.errors import StorageError, StoreUnavailable, first_raised


async def _fail(error: Exception) -> None:
    raise error


async def _run(*errors: Exception) -> None:
    with first_raised(StorageError):
        async with asyncio.TaskGroup() as tasks:
            for error in errors:
                tasks.create_task(_fail(error))


async def test_the_first_error_of_a_group_comes_alone() -> None:
    with pytest.raises(StoreUnavailable, match=r"^a$"):
        await _run(StoreUnavailable("a"), StoreUnavailable("b"))


async def test_an_error_of_another_kind_leaves_the_group_whole() -> None:
    with pytest.raises(ExceptionGroup) as failed:
        await _run(StoreUnavailable("a"), ValueError("b"))
    assert [str(one) for one in failed.value.exceptions] == ["a", "b"]
