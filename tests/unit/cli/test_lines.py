import io
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slatemq.cli.publish.lines import (
    BATCH_BYTES,
    BATCH_LINES,
    Batch,
    LineError,
    LineReader,
    TooFewLines,
    parse_pointers,
)


def read(content: bytes, skip: int = 0) -> list[Batch]:
    reader = LineReader(io.BytesIO(content))
    assert reader.skip(skip) == len(b"".join(content.splitlines(keepends=True)[:skip]))
    return list(iter(reader.next_batch, None))


def payloads(batches: list[Batch]) -> list[bytes]:
    return [message.payload for batch in batches for message in batch.messages]


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"\n", [b""]),
        (b"a", [b"a"]),
        (b"a\n", [b"a"]),
        (b"a\r\n\n\x00\xff\nb", [b"a\r", b"", b"\x00\xff", b"b"]),
        ("a\u2028b\x0b\x0c\x1c\x85\n".encode(), ["a\u2028b\x0b\x0c\x1c\x85".encode()]),
    ],
)
def test_only_a_newline_ends_a_line(content: bytes, lines: list[bytes]) -> None:
    assert payloads(list(iter(LineReader(io.BytesIO(content)).next_batch, None))) == lines


@given(st.lists(st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"")), max_size=50))
def test_any_lines_come_out_byte_for_byte(lines: list[bytes]) -> None:
    content = b"".join(line + b"\n" for line in lines)

    batches = list(iter(LineReader(io.BytesIO(content)).next_batch, None))

    assert payloads(batches) == lines
    assert sum(batch.source_bytes for batch in batches) == len(content)


def test_batches_end_at_multiples_of_lines() -> None:
    batches = read(b"x\n" * 2500)

    assert [(batch.first, batch.last) for batch in batches] == [
        (1, 1000),
        (1001, 2000),
        (2001, 2500),
    ]


def test_who_goes_on_from_the_end_of_a_batch_cuts_the_same_batches() -> None:
    # Given lines of which some are large, so that batches are cut by bytes too
    sizes = [BATCH_BYTES // 3, 10, 2 * BATCH_BYTES, 0, BATCH_BYTES // 2]
    lines = [bytes([65 + n % 26]) * size for n, size in zip(range(12), itertools.cycle(sizes))]
    content = b"".join(line + b"\n" for line in lines) + b"y\n" * BATCH_LINES
    whole = read(content)
    assert len(whole) > 3

    # Then from the end of any of them the rest is the same
    for place, batch in enumerate(whole, 1):
        assert read(content, skip=batch.last) == whole[place:]


def test_a_batch_stays_below_its_bytes_unless_it_is_one_line() -> None:
    batches = read(b"".join(b"z" * (BATCH_BYTES // 3) + b"\n" for _ in range(10)))

    assert all(batch.payload_bytes <= BATCH_BYTES for batch in batches)
    assert [len(batch.messages) for batch in batches] == [3, 3, 3, 1]


def test_a_bad_line_is_named_by_its_number_in_the_file() -> None:
    content = b'{"type": "a"}\n{"type": []}\n'
    reader = LineReader(io.BytesIO(content), pointers=parse_pointers(["/type"]))
    reader.skip(1)

    with pytest.raises(LineError, match="line 2: /type is an array"):
        reader.next_batch()


def test_lines_that_are_skipped_are_not_looked_into() -> None:
    reader = LineReader(io.BytesIO(b"no json\n{}\n"), pointers=parse_pointers(["/type"]))

    reader.skip(1)
    batch = reader.next_batch()

    assert batch is not None
    assert [message.payload for message in batch.messages] == [b"{}"]


def test_more_cannot_be_skipped_than_there_is() -> None:
    with pytest.raises(TooFewLines, match="only 3 lines"):
        LineReader(io.BytesIO(b"a\nb\nc")).skip(4)


def test_a_line_no_instance_takes_is_refused_before_it_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slatemq.cli.publish.lines.LINE_BYTES_MAX", 10)
    stream = io.BytesIO(b"0123456789\n" + b"x" * 1000)
    reader = LineReader(stream)

    with pytest.raises(LineError, match="line 2: is longer than 10 bytes"):
        reader.next_batch()
    assert stream.tell() < 40
