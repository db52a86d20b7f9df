"""Listings of all brokers: print what came, then fail for what is missing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from slatemq.cli.output import write_json
from slatemq.cli.session import Session
from slatemq.errors import SlateMQError

if TYPE_CHECKING:
    from slatemq.client import Client

T = TypeVar("T")


def write_listing(
    session: Session,
    items: Callable[[Client], AsyncIterator[T]],
    fields: Callable[[T], Mapping[str, Any]],
    show: Callable[[Sequence[T]], None],
) -> None:
    """Print all items: with --json the fields of each, else what `show` makes of them.

    Raises SlateMQError where the listing is not complete, after printing what came before.
    """
    found: list[T] = []

    async def collect(client: Client) -> SlateMQError | None:
        try:
            async for item in items(client):
                found.append(item)  # noqa: PERF401 - what came before an error is printed
        except SlateMQError as error:
            return error
        return None

    problem = session.call(collect)
    if problem is not None and not found:
        raise problem
    if session.json:
        for one in found:
            write_json(fields(one))
    else:
        show(found)
    if problem is not None:
        raise problem


def silent_brokers(shards: Iterable[int]) -> str:
    """A note about brokers whose part of an answer is missing."""
    named = [str(shard) for shard in sorted(shards)]
    if len(named) == 1:
        return f"broker shard {named[0]} did not answer: its queues are not listed"
    return f"broker shards {', '.join(named)} did not answer: their queues are not listed"
