"""Messages are the same to their reader, however long the runs were that they came in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slatemq._consume.delivered import LeaseKeeper, Origin, Received, claimed_of, received
from slatemq._consume.finishing import Finisher
from slatemq._rpc.peers import Peers
from slatemq._rpc.queue_locations import QueueLocations
from slatemq.errors import Internal
from slatemq.v1 import consumer_pb2, message_pb2
from tests.claimed_runs import each_of

HEADERS = st.dictionaries(st.sampled_from("abc"), st.text(max_size=3))
RUNS = st.builds(
    lambda block, first, payloads, headers, numbers: consumer_pb2.ClaimedRun(
        common=message_pb2.Message(
            headers=headers,
            created_at_ms=numbers[0],
            received_at_ms=numbers[1],
            retention_s=numbers[2],
        ),
        message_ids=[numbers[3] + at * at for at in range(len(payloads))],
        payloads=payloads,
        lease_token=f"3-{block << 8 | first:016x}",
        lease_deadline_ms=numbers[4],
        attempts_count=numbers[5],
        priority=numbers[6],
        lease_ms=numbers[7],
    ),
    st.integers(0, (1 << 56) - 1),
    st.integers(0, 256 - 9),
    st.lists(st.binary(max_size=9), min_size=1, max_size=9),
    HEADERS,
    st.tuples(*[st.integers(0, 1 << 30)] * 8),
)


def properties(message: Received) -> dict[str, object]:
    """All that a message has."""
    names = [name for name, kind in vars(Received).items() if isinstance(kind, property)]
    return {name: getattr(message, name) for name in [*names, "payload"]} | {"": repr(message)}


def origin() -> Origin:
    return Origin("q", Finisher(QueueLocations(Peers(["127.0.0.1:1"]))))


@given(st.lists(RUNS, max_size=4))
def test_messages_of_long_runs_are_those_of_runs_of_one(
    runs: list[consumer_pb2.ClaimedRun],
) -> None:
    wires = [wire for run in runs for wire in each_of(run)]
    ones = [
        consumer_pb2.ClaimedRun(
            common=run.common,
            message_ids=[wire.message.message_id],
            payloads=[wire.message.payload],
            lease_token=wire.lease_token,
            lease_deadline_ms=run.lease_deadline_ms,
            attempts_count=run.attempts_count,
            priority=run.priority,
            lease_ms=run.lease_ms,
        )
        for run in runs
        for wire in each_of(run)
    ]

    each = received(claimed_of(consumer_pb2.ClaimResponse(runs=ones)), origin())
    in_runs = received(claimed_of(consumer_pb2.ClaimResponse(runs=runs)), origin())

    assert list(map(properties, in_runs)) == list(map(properties, each))
    assert [message.message_id for message in each] == [wire.message.message_id for wire in wires]
    assert [message.lease_token for message in each] == [wire.lease_token for wire in wires]


@given(HEADERS)
def test_each_message_of_a_run_has_headers_of_its_own(headers: dict[str, str]) -> None:
    run = consumer_pb2.ClaimedRun(
        common=message_pb2.Message(headers=headers),
        message_ids=[1, 2],
        payloads=[b"", b""],
        lease_token="0-0000000000000000",
    )
    first, second = received(claimed_of(consumer_pb2.ClaimResponse(runs=[run])), origin())

    assert first.headers == second.headers == headers
    assert first.headers is first.headers
    first.headers["z"] = "mine"  # type: ignore[index]  # not meant, but it was always possible
    assert second.headers == headers
    assert second.headers.get("not there") is None
    with pytest.raises(KeyError, match="not there"):
        second.headers["not there"]


@pytest.mark.parametrize(
    ("token", "ids", "payloads"),
    [
        ("", 2, 2),
        ("z", 2, 2),
        ("0-00000000000000zz", 2, 2),
        ("0-0000000000000000", 0, 0),
        ("0-0000000000000000", 0, 1),
        ("0-0000000000000000", 2, 1),
        ("0-0000000000000000", 1, 2),
        ("0-00000000000000ff", 2, 2),
    ],
)
def test_a_run_that_would_mix_messages_up_is_refused(token: str, ids: int, payloads: int) -> None:
    run = consumer_pb2.ClaimedRun(
        lease_token=token, message_ids=range(ids), payloads=[b"p"] * payloads
    )
    with pytest.raises(Internal, match="a broker answered with"):
        claimed_of(consumer_pb2.ClaimResponse(runs=[run]))


async def test_what_is_no_token_is_refused_by_name_while_leases_are_kept() -> None:
    locations = QueueLocations(Peers(["127.0.0.1:1"]))
    keeper = LeaseKeeper(Finisher(locations))
    keeper.hold("0-00", 60_000, 60.0)
    keeper.drop_all([["0-00"], {}, None, "0-01"])
    keeper.drop_all(["0-00"])
    assert not keeper._held
    await keeper.close()
