"""An entry that is to be changed is found again by its bytes, or by its text where those differ."""

import os
import tempfile
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slatemq.textqueue import Entry, FormatError, Rewritten, State, scan
from slatemq.textqueue.editing import again
from tests.unit.textqueue.claims import Make

LINES = st.sampled_from(
    ["-a", "-b", "=a", "!a", "#a", "?a", "é", " more", "\\v=1 ", "\\v=2 ", "", "-a\r", "-", "\\"]
)

FILES = st.builds("{}\n{}{}".format, st.just("-a"), st.lists(LINES).map("\n".join), LINES)


def read_anew(content: bytes, entry: Entry) -> bytes | None:
    """Its bytes as a reader finds them who begins at its place; None where it is not there."""
    rest, before = content[entry.offset :], content[: entry.offset]
    if rest[:1] in (b"", b"\n", b" ", b"\\") or (before and not before.endswith(b"\n")):
        return None
    pieces = iter([rest])
    try:
        now = next(scan(lambda _: next(pieces, b"")))
    except FormatError:
        return None
    return now.raw if now.text == entry.text else None


@given(FILES, FILES)
@example("-a", "-ab")
@example("-a", "=a")
@example("-a\n\\v=1", "-a\n\\v=12")
@example("-a\n\\v=1\n-b", "-a\n\\v=1\n\\w=2\n-b")
@example("-a\n-b", "-a\n\n-b")
@example("-a\n-b", "-a\n b")
@example("-a\n-b", "?a\n-b")
def test_it_is_found_just_as_if_it_were_read_again(before: str, after: str) -> None:
    # Given a file of which entries were read, and what someone has made of it since
    pieces = iter([before.encode()])
    read, known = scan(lambda _: next(pieces, b"")), list[Entry]()
    with suppress(FormatError):  # those before a broken line have come
        known.extend(read)
    content = after.encode()
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()

        for entry in known:
            expected = read_anew(content, entry)
            if expected is None:
                with pytest.raises(Rewritten):
                    again(file.fileno(), entry)
                continue
            now = again(file.fileno(), entry)
            assert (now.raw, now.offset, now.line) == (expected, entry.offset, entry.line)


def test_marking_reads_the_message_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a message among others
    queue = make(b"-message\n\\v=1\n" * 1000)
    [entry] = [entry for entry in queue if entry.line == 999]
    sizes = list[int]()
    read = os.pread

    def counted(descriptor: int, wanted: int, offset: int) -> bytes:
        sizes.append(wanted)
        return read(descriptor, wanted, offset)

    monkeypatch.setattr(os, "pread", counted)
    queue.done(entry)

    # Then it was read before the mark and after it, and nothing beside it
    assert sizes == [len(entry.raw) + 2] * 2
    assert queue.entry(entry.offset).state is State.PROCESSED
