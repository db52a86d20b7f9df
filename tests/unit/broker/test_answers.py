"""The messages of an answer, encoded by hand, parse as what they were meant to be."""

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from services.broker.answers import tell
from services.broker.leases import Lease
from services.broker.payloads import Held
from services.broker.tokens import token_text
from slatemq.v1.consumer_pb2 import ClaimedMessage, ClaimResponse, ConsumeResponse
from slatemq.v1.message_pb2 import Message

NUMBERS = st.integers(0, 1 << 50)
ENDS = st.tuples(NUMBERS, st.integers(0, 300), st.integers(0, 255), NUMBERS)


@given(
    st.lists(st.tuples(st.integers(1, (1 << 64) - 1), st.binary(max_size=400), ENDS), max_size=9),
    st.integers(0, 0x3FFF),
)
def test_an_answer_of_either_kind_is_parsed_as_it_was_meant(
    given_out: list[tuple[int, bytes, tuple[int, int, int, int]]], shard: int
) -> None:
    queue = cast("Any", None)
    expected, delivered = [], []
    for token, payload, (deadline_ms, attempts, priority, length_ms) in given_out:
        message = Message(message_id=token >> 2, payload=payload, headers={"a": "b"})
        lease = Lease(token, 1, priority, 0, deadline_ms, attempts, 0, length_ms, "c", queue)
        delivered.append((lease, Held(message.SerializeToString(), len(payload))))
        expected.append(
            ClaimedMessage(
                message=message,
                lease_token=token_text(shard, token),
                lease_deadline_ms=deadline_ms,
                attempts_count=attempts,
                priority=priority,
                lease_ms=length_ms,
            )
        )

    encoded = tell(shard, delivered)

    assert list(ClaimResponse.FromString(encoded).messages) == expected
    assert list(ConsumeResponse.FromString(encoded).messages) == expected
