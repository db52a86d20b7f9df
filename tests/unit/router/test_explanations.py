"""Explanations of messages by the queues that a router knows: whose, and how many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from libs.access.callers import Callers
from libs.access.current import current_caller
from libs.access.policy import Policy
from libs.access.principals import Principal
from libs.access.reloading import ReloadedFile
from libs.filters import Facts, QueueOutcome
from libs.storage.layout.partitions import Partition, partition_of_value
from services.router.routing import BrokerRules, QueueRule
from services.router.servicer import EXPLANATIONS_MAX, Explainer
from slatemq.errors import ResourceExhausted, Unavailable

POLICY = """
roles:
  own:
    - {verbs: [inspect], queues: ["own-*"]}
bindings:
  - {principals: [tenant], roles: [own]}
"""
MESSAGE = Facts({})


class Rules(BrokerRules):
    """Notes which queues are asked for a judgement."""

    def __init__(self, *queue_ids: str) -> None:
        super().__init__()
        self.change([QueueRule(queue_id, "true") for queue_id in queue_ids])
        self.judged: list[str] = []

    def explain(self, message: Facts, queue_ids: Iterable[str]) -> list[QueueOutcome]:
        self.judged += queue_ids
        return super().explain(message, queue_ids)


class Router:
    """Knows some rules; a refresh of them waits until it is let through."""

    def __init__(self, *queue_ids: str) -> None:
        self.rules = Rules(*queue_ids)
        self.links = {0: SimpleNamespace(rules=self.rules)}
        self.refreshes_count = 0
        self.through = asyncio.Event()
        self.failure: Exception | None = None

    async def refresh_rules(self) -> list[int]:
        self.refreshes_count += 1
        await self.through.wait()
        if self.failure is not None:
            raise self.failure
        return []


@contextmanager
def called_by(name: str, folder: Path) -> Iterator[None]:
    (folder / "policy.yaml").write_text(POLICY)
    callers = Callers(ReloadedFile.of_document(folder / "policy.yaml", Policy))
    token = current_caller.set(callers._caller(Principal(name, "token")))
    try:
        yield
    finally:
        current_caller.reset(token)


def explainer(router: Any) -> Explainer:
    return Explainer(router)


async def test_a_queue_that_the_caller_may_not_inspect_is_not_judged(tmp_path: Path) -> None:
    router = Router("own-1", "own-2", "theirs")
    router.through.set()

    with called_by("tenant", tmp_path):
        outcomes = await explainer(router).explain(MESSAGE, [])

    assert [one.queue_id for one in outcomes] == ["own-1", "own-2"]
    assert sorted(router.rules.judged) == ["own-1", "own-2"]


async def test_a_queue_is_not_explained_without_the_partition_that_gets_the_message() -> None:
    router = Router()
    router.through.set()
    parts = [Partition(index, 2, "customer") for index in range(2)]
    own = partition_of_value("c", 2)
    other = QueueRule("q", "true", partition=parts[1 - own])
    router.rules.change([other])
    message = Facts({"customer": "c"})

    with pytest.raises(Unavailable) as refused:
        await explainer(router).explain(message, ["q"])
    assert refused.value.reason == "QUEUES_UNKNOWN"
    assert await explainer(router).explain(message, []) == []

    router.rules.change([other._replace(partition=parts[own])])
    [outcome] = await explainer(router).explain(message, ["q"])
    assert outcome.matched


async def test_no_more_than_some_messages_are_judged_at_once() -> None:
    router = Router("q")
    explaining = explainer(router)
    calls = [asyncio.create_task(explaining.explain(MESSAGE, [])) for _ in range(EXPLANATIONS_MAX)]
    await asyncio.sleep(0)

    with pytest.raises(ResourceExhausted) as caught:
        await explaining.explain(MESSAGE, [])
    assert caught.value.reason == "TOO_MANY_EXPLANATIONS"
    assert caught.value.retry_after_ms is not None

    # Those that are cancelled, or come to their end, leave their places to others
    calls[0].cancel()
    await asyncio.wait(calls[:1])
    last = asyncio.create_task(explaining.explain(MESSAGE, []))
    router.through.set()
    for call in (*calls[1:], last):
        assert [one.matched for one in await call] == [True]
    assert [one.matched for one in await explaining.explain(MESSAGE, ["q"])] == [True]


async def test_calls_that_wait_share_a_refresh_that_began_after_they_came() -> None:
    router = Router("q")
    explaining = explainer(router)
    first = asyncio.create_task(explaining.explain(MESSAGE, []))
    while not router.refreshes_count:
        await asyncio.sleep(0)

    others = [asyncio.create_task(explaining.explain(MESSAGE, [])) for _ in range(5)]
    await asyncio.sleep(0)
    router.through.set()
    await asyncio.gather(first, *others)

    assert router.refreshes_count == 2


async def test_a_refresh_that_fails_does_so_for_its_own_calls_alone() -> None:
    router = Router("q")
    router.failure = Unavailable("no broker")
    router.through.set()
    explaining = explainer(router)

    with pytest.raises(Unavailable):
        await explaining.explain(MESSAGE, [])
    router.failure = None

    assert len(await explaining.explain(MESSAGE, [])) == 1
