"""What a token may see, and whose looks serve it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.console.sights import Sight
from slatemq import Caller, Queue
from slatemq._admin.instance import Status
from slatemq._admin.queue_models import QueuePartition
from slatemq.models import RouteStatus, ServiceStatus

ROUTE = RouteStatus(0, 0, 1, 1, 0)


def caller(*patterns: str, operates: bool = False) -> Caller:
    return Caller("someone", ["inspect", *["operate"] * operates], patterns)


def queue(queue_id: str, *shards: int) -> Queue:
    partitions = {index: QueuePartition(shard) for index, shard in enumerate(shards)}
    settings = ("true", "0", 1, 1, 1, 1, 1)
    return Queue(queue_id, *settings, shards[0], 1, "", 1, 1, partitions=partitions)


def status(*queues: Queue, brokers: tuple[int, ...] = (0,)) -> Status:
    services = [ServiceStatus("broker", shard, "", True) for shard in brokers]
    return Status(services, [ROUTE], list(queues), [], refusals=["of who has looked"])


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        (["*"], ["*"]),
        (["*"], ["orders*", "bills"]),
        (["*"], []),
        (["orders*", "bills"], ["bills", "orders-eu", "orders-*-late"]),
        (["*-late"], ["orders*-late"]),
    ],
)
def test_patterns_cover_those_that_match_nothing_else(wide: list[str], narrow: list[str]) -> None:
    assert Sight({0: caller(*wide)}).covers(Sight({0: caller(*narrow)}))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([], ["bills"]),
        (["orders"], ["orders*"]),
        (["orders-*"], ["orders*"]),
        (["orders*"], ["orders*", "bills"]),
        (["a*"], ["*"]),
    ],
)
def test_patterns_do_not_cover_those_that_match_more(one: list[str], other: list[str]) -> None:
    assert not Sight({0: caller(*one)}).covers(Sight({0: caller(*other)}))


@given(st.lists(st.text("ab*", min_size=1), max_size=3), st.lists(st.text("ab*", min_size=1)))
def test_what_is_covered_has_no_queue_that_the_other_lacks(
    wide: list[str], narrow: list[str]
) -> None:
    wider, narrower = (Sight({0: caller(*patterns)}) for patterns in (wide, narrow))
    if wider.covers(narrower):
        for pattern in narrow:
            for text in ("", "a", "ab", "b*a"):
                one = queue(pattern.replace("*", text), 0)
                found = status(one)
                assert narrower.restricted(found).queues == wider.restricted(found).queues == [one]


def test_who_may_not_operate_looks_for_none_who_may() -> None:
    operator, reader = Sight({0: caller("*", operates=True)}), Sight({0: caller("*")})

    assert operator.covers(reader)
    assert not reader.covers(operator)


def test_a_queue_is_seen_where_each_of_its_brokers_permits_it() -> None:
    found = status(queue("a", 0), queue("a-all", 0, 1), queue("b", 1), brokers=(0, 1))

    seen = Sight({0: caller("a*"), 1: caller("b")}).restricted(found)

    assert [one.queue_id for one in seen.queues] == ["a", "b"]


def test_of_a_broker_that_did_not_say_nothing_is_seen() -> None:
    found = status(queue("a", 0), queue("b", 1), queue("c", 0, 1), brokers=(0, 1))
    sight = Sight({0: caller("*")})

    assert [one.queue_id for one in sight.restricted(found).queues] == ["a"]
    assert sight.restricted(found).unlisted_brokers == [1]
    assert not sight.covers(Sight({1: caller("a")}))
    assert Sight({}).restricted(found).routes == []


def test_what_is_not_shown_is_said_with_the_name_of_who_may_not_see_it() -> None:
    found = status(queue("a", 0))

    operator = Sight({0: caller("*", operates=True)}).restricted(found)
    reader = Sight({0: caller("a")}).restricted(found)
    stranger = Sight({0: caller()}).restricted(found)

    routes = "routes are not shown: no rule permits 'someone' to operate"
    queues = "queues are not shown: no rule permits 'someone' to inspect"
    assert (operator.routes, operator.refusals) == ([ROUTE], [])
    assert (reader.routes, reader.refusals) == ([], [routes])
    assert (stranger.queues, stranger.refusals) == ([], [routes, queues])
