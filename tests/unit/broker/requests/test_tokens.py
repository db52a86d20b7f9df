"""Tokens by the thousand are read and written as one by one."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from services.broker.requests.tokens import parse_token, parse_tokens, token_parts, token_text
from slatemq.errors import InvalidArgument

LEASES = st.integers(1, (1 << 64) - 1)
SHARDS = st.integers(0, 0x3FFF)
TOKENS = st.builds(token_text, st.integers(0, 2), LEASES)
ODD = st.text("0123456789abcdefABCDEF-\n _+x", max_size=40) | st.text(max_size=20)
A, B = token_text(0, 0xABC), token_text(0, 0xDEF)


@given(SHARDS, st.lists(LEASES, max_size=20))
def test_tokens_are_written_as_one_by_one_and_read_again(shard: int, leases: list[int]) -> None:
    prefix, ends = token_parts(shard, leases)
    texts = [(prefix + end).decode() for end in ends]

    assert texts == [token_text(shard, lease) for lease in leases]
    assert list(parse_tokens(texts, shard) or ()) == leases


@given(st.lists(TOKENS | ODD, max_size=6))
@example([f"{A}\n{B}", ""])
@example([f"{A}\n{B[:-1]}", B[-1]])
@example(["", f"{A}\n{B}"])
@example(["0-0-" + A[2:-2]])
@example([A[2:]])
@example([A.upper()])
@example([A[:9] + " " + A[10:]])
@example(["0-" + "０" * 16])
def test_what_is_no_token_of_this_shard_is_left_to_a_closer_look(texts: list[str]) -> None:
    def one_by_one() -> list[int] | None:
        leases = []
        for text in texts:
            try:
                shard, lease = parse_token(text, "")
            except InvalidArgument:
                return None
            if shard != 0:
                return None
            leases.append(lease)
        return leases

    read = parse_tokens(texts, 0)

    assert (None if read is None else list(read)) == one_by_one()
