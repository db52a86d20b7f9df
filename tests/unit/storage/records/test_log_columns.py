import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from libs.storage.records.metadata import (
    MessageMetadata,
    decode_log_entry,
    encode_headers,
    encode_log_columns,
    encode_log_entry,
    read_log_runs,
)

rows = st.lists(
    st.tuples(
        st.integers(0, 2**62),
        st.integers(0, 2**32 - 1),
        st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=4),
        st.integers(0, 2**32 - 1),
        st.just(0) | st.integers(0, 2**62),
        st.none() | st.integers(0, 2**62),
        st.just("") | st.text(max_size=5),
    ),
    min_size=1,
    max_size=20,
)
Numbers = tuple[int, int, dict[str, str], int, int, int | None, str]


@given(rows, st.integers(1, 2**60), st.integers(0, 2**60))
@example([(0, 0, {}, 0, 0, None, "")], 1, 0)
def test_columns_encode_to_the_bytes_of_the_messages_they_stand_for(
    rows: list[Numbers], first_id: int, received_ms: int
) -> None:
    created, retention, headers, sizes, visible, delays, queues = zip(*rows, strict=True)
    messages = [
        MessageMetadata(
            message_id=first_id + at,
            created_at_ms=created[at],
            received_at_ms=received_ms,
            visible_at_ms=visible[at],
            retention_s=retention[at],
            headers=dict(sorted(headers[at].items())),
            delay_ms=delays[at],
            payload_bytes=sizes[at],
            direct_queue_id=queues[at],
        )
        for at in range(len(rows))
    ]

    encoded = encode_log_columns(
        first_id,
        received_ms,
        created,
        retention,
        [encode_headers(h) for h in headers],
        sizes,
        {at: value for at, value in enumerate(visible) if value},
        {at: value for at, value in enumerate(delays) if value is not None},
        {at: value for at, value in enumerate(queues) if value},
    )

    assert encoded == encode_log_entry(messages)
    assert decode_log_entry(encoded) == messages


HEADERS = st.dictionaries(st.sampled_from(["", "a", "b"]), st.sampled_from(["", "x", "xy"]))


@settings(deadline=None)
@given(st.lists(HEADERS, min_size=1, max_size=12))
def test_headers_are_read_right_where_neighbours_begin_alike(headers: list[dict[str, str]]) -> None:
    messages = [MessageMetadata(at, 1, 2, 0, 3, one) for at, one in enumerate(headers, 1)]

    read = decode_log_entry(encode_log_entry(messages))

    assert [list(one.headers.items()) for one in read] == [list(one.items()) for one in headers]


def test_neighbours_of_equal_headers_share_them() -> None:
    messages = [MessageMetadata(at, at, 2, 0, 3, {"a": "b"}) for at in (1, 2)]

    (_, one, *_), (_, two, *_) = read_log_runs(encode_log_entry(messages))

    assert one is two


def test_an_entry_without_a_pushed_message_has_no_column_for_it() -> None:
    plain = MessageMetadata(42, 1, 2, 3, 4, {}, 5, 6)
    pushed = MessageMetadata(43, 1, 2, 3, 4, {}, 5, 6, "orders")
    entry, longer = encode_log_entry([plain, plain]), encode_log_entry([plain, pushed])
    assert len(longer) == len(entry) + 2 + 2 + 2 + len("orders")
    assert [one.direct_queue_id for one in decode_log_entry(entry)] == ["", ""]
    assert decode_log_entry(longer) == [plain, pushed]


def test_a_header_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="header 'x' has 65536 bytes"):
        encode_headers({"x": "v" * 65_536})
    with pytest.raises(ValueError, match="header key has 65536 bytes"):
        encode_headers({"k" * 65_536: ""})
    with pytest.raises(ValueError, match="256"):
        encode_headers({str(n): "" for n in range(256)})


def test_a_number_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="log entry 5"):
        encode_log_columns(5, 0, [0], [2**32], [b"\x00"], [0])
    with pytest.raises(ValueError, match="payload_bytes"):
        encode_log_columns(5, 0, [0], [0], [b"\x00"], [2**32])
    with pytest.raises(ValueError, match="log entry 5: columns"):
        encode_log_columns(5, 0, [0, 0], [0], [b"\x00"], [0])


def test_numbers_of_many_messages_that_do_not_fit_are_refused() -> None:
    for first_id, retention_s in ((2**64 - 99, 0), (5, 2**32), (-1, 0)):
        with pytest.raises(ValueError, match=f"log entry {first_id}: a number does not fit"):
            encode_log_columns(
                first_id, 0, [0] * 100, [retention_s] * 100, [b"\x00"] * 100, [0] * 100
            )
