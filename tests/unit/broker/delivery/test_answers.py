"""The messages of an answer, encoded by hand, parse as what they were meant to be."""

import asyncio
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.storage.layout.buckets import BucketKind
from libs.storage.records.queues import AvailableMessage
from services.broker.core.leases import Claimed, Terms
from services.broker.core.waiting.scan import Segment
from services.broker.delivery import responses as answers
from services.broker.delivery.responses import encode_messages
from services.broker.delivery.waiters import ClaimBatch
from services.broker.requests.tokens import token_text
from slatemq.v1.consumer_pb2 import ClaimResponse, ConsumeResponse
from slatemq.v1.message_pb2 import Message
from tests.claimed_runs import ClaimedMessage, messages_of
from tests.stored_messages import cached

NUMBERS = st.integers(0, 1 << 50)
MESSAGES = st.lists(
    st.tuples(
        st.integers(1, (1 << 64) - 1),
        st.binary(max_size=400),
        st.integers(0, 300),
        st.integers(0, 255),
        st.sampled_from(("", "b", "c" * 200)),
    ),
    min_size=1,
    max_size=9,
)


@given(
    st.lists(st.tuples(MESSAGES, NUMBERS, NUMBERS), max_size=3),
    st.integers(0, 0x3FFF),
)
def test_an_answer_is_parsed_as_it_was_meant(
    claims: list[tuple[list[tuple[int, bytes, int, int, str]], int, int]], shard: int
) -> None:
    expected, delivered = [], []
    for messages, deadline_ms, length_ms in claims:
        items, held = [], []
        for token, payload, attempts, priority, value in messages:
            message = Message(message_id=token >> 2, payload=payload, headers={"a": value})
            items.append(AvailableMessage(token >> 2, priority, 0, 0, attempts))
            held.append(cached(message))
            expected.append(
                ClaimedMessage(
                    message,
                    token_text(shard, token),
                    deadline_ms,
                    attempts + 1,
                    priority,
                    length_ms,
                )
            )
        terms = Terms(cast("Any", None), "c", 0, deadline_ms, length_ms)
        segment = Segment(items, BucketKind.READY, 1, range(len(items)))
        claimed = Claimed(terms, [segment])
        claimed.tokens += [token for token, *_ in messages]
        claimed.parts += [(cast("Any", None), at, at + 1) for at in range(len(messages))]
        delivered.append(ClaimBatch(claimed, held))

    for encoded in each_way(shard, delivered):
        assert messages_of(ClaimResponse.FromString(encoded)) == expected
        assert messages_of(ConsumeResponse.FromString(encoded)) == expected


def each_way(shard: int, delivered: list[ClaimBatch]) -> list[bytes]:
    """In runs of one, and in runs that are as long as they can be."""
    encoded = []
    for run_min in (1 << 20, 0):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(answers, "RUN_MIN", run_min)
            encoded.append(asyncio.run(encode_messages(shard, delivered)))
    return encoded


KINDS = st.tuples(st.sampled_from((0, 0, 0, 7)), st.sampled_from((0, 0, 0, 200)))
BLOCKS = st.lists(
    st.tuples(
        st.integers(1, (1 << 56) - 1),  # the block of the tokens
        st.integers(1, 1 << 61),  # the first ID
        st.booleans(),  # whether IDs are in a row
        st.lists(
            st.tuples(st.binary(max_size=150), KINDS, st.sampled_from(("", "", "b"))),
            min_size=1,
            max_size=40,
        ),
    ),
    min_size=1,
    max_size=3,
)


@given(st.lists(BLOCKS, max_size=3), st.integers(0, 0x3FFF))
def test_an_answer_has_the_same_messages_in_runs_of_any_length(
    claims: list[list[tuple[int, int, bool, list[tuple[bytes, tuple[int, int], str]]]]],
    shard: int,
) -> None:
    delivered = [_given(blocks, 1000 + at) for at, blocks in enumerate(claims)]

    ones, runs = (ClaimResponse.FromString(one) for one in each_way(shard, delivered))

    assert messages_of(ones) == messages_of(runs)
    assert len(ones.runs) == len(messages_of(ones))
    assert len(runs.runs) <= len(ones.runs)
    chosen = ClaimResponse.FromString(asyncio.run(encode_messages(shard, delivered)))
    are_long = len(ones.runs) >= answers.RUN_MIN * len(runs.runs)
    assert chosen == (runs if are_long else ones)


def test_messages_of_which_many_are_alike_come_in_few_runs() -> None:
    # Given two blocks of tokens, one of which has a message that was claimed before
    messages = [(b"%d" % number, (0, 0), "b") for number in range(100)]
    again = [
        (payload, (int(number == 50), 0), value)
        for number, (payload, _, value) in enumerate(messages)
    ]
    given = _given([(1, 1, True, messages), (2, 500, True, again)], 1000)

    answer = ClaimResponse.FromString(asyncio.run(encode_messages(0, [given])))

    assert [len(run.message_ids) for run in answer.runs] == [100, 50, 1, 49]
    assert [run.attempts_count for run in answer.runs] == [1, 1, 2, 1]


def _given(
    blocks: list[tuple[int, int, bool, list[tuple[bytes, tuple[int, int], str]]]], deadline_ms: int
) -> ClaimBatch:
    """A claim whose leases are in buckets with a block of tokens each."""
    items, held = [], []
    tokens: list[int] = []
    parts: list[tuple[Any, int, int]] = []
    for block, first_id, in_a_row, messages in blocks:
        parts.append((None, len(tokens), len(tokens) + len(messages)))
        tokens += range(block << 8, (block << 8) + len(messages))
        for at, (payload, (attempts, priority), value) in enumerate(messages):
            message_id = first_id + (at if in_a_row else at * at)
            message = Message(message_id=message_id, payload=payload, headers={"a": value})
            items.append(AvailableMessage(message_id, priority, 0, 0, attempts))
            held.append(cached(message))
    terms = Terms(cast("Any", None), "c", 0, deadline_ms, 30_000)
    claimed = Claimed(terms, [Segment(items, BucketKind.READY, 1, range(len(items)))])
    claimed.tokens += tokens
    claimed.parts += parts
    return ClaimBatch(claimed, held)


async def test_others_have_their_turn_between_the_parts_of_an_answer() -> None:
    parts = [_given([(block, block, True, [(b"x", (0, 0), "")])], 0) for block in range(1, 6)]
    turns = 0

    encoding = asyncio.ensure_future(encode_messages(0, parts))
    while not encoding.done():
        await asyncio.sleep(0)
        turns += 1

    assert turns > len(parts) - 1
    assert len(messages_of(ClaimResponse.FromString(encoding.result()))) == len(parts)
