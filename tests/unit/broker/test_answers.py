"""The messages of an answer, encoded by hand, parse as what they were meant to be."""

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from libs.storage.buckets import BucketKind
from libs.storage.queues import AvailableMessage
from services.broker.answers import tell
from services.broker.lease_buckets import Claimed, Terms
from services.broker.payloads import held_of
from services.broker.tokens import token_text
from services.broker.waiters import Given
from services.broker.walks import Segment
from slatemq.v1.consumer_pb2 import ClaimedMessage, ClaimResponse, ConsumeResponse
from slatemq.v1.message_pb2 import Message

NUMBERS = st.integers(0, 1 << 50)
MESSAGES = st.lists(
    st.tuples(
        st.integers(1, (1 << 64) - 1),
        st.binary(max_size=400),
        st.integers(0, 300),
        st.integers(0, 255),
        st.sampled_from(("", "b", "c" * 200)),
    ),
    max_size=9,
)


@given(
    st.lists(st.tuples(MESSAGES, NUMBERS, NUMBERS), max_size=3),
    st.integers(0, 0x3FFF),
)
def test_an_answer_of_either_kind_is_parsed_as_it_was_meant(
    claims: list[tuple[list[tuple[int, bytes, int, int, str]], int, int]], shard: int
) -> None:
    expected, delivered = [], []
    for messages, deadline_ms, length_ms in claims:
        items, held = [], []
        for token, payload, attempts, priority, value in messages:
            message = Message(message_id=token >> 2, payload=payload, headers={"a": value})
            items.append(AvailableMessage(token >> 2, priority, 0, 0, attempts))
            held.append(held_of(message))
            expected.append(
                ClaimedMessage(
                    message=message,
                    lease_token=token_text(shard, token),
                    lease_deadline_ms=deadline_ms,
                    attempts_count=attempts + 1,
                    priority=priority,
                    lease_ms=length_ms,
                )
            )
        terms = Terms(cast("Any", None), "c", 0, deadline_ms, length_ms)
        segment = Segment(items, BucketKind.READY, 1, range(len(items)))
        claimed = Claimed(terms, [segment])
        claimed.tokens += [token for token, *_ in messages]
        delivered.append(Given(claimed, held))

    encoded = tell(shard, delivered)

    assert list(ClaimResponse.FromString(encoded).messages) == expected
    assert list(ConsumeResponse.FromString(encoded).messages) == expected
