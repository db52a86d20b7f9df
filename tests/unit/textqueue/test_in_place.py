"""Marking, setting and appending: what moves in the file, and what must not."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slatemq.textqueue import (
    AlreadyMarked,
    BadText,
    Busy,
    DoesNotFit,
    Entry,
    FormatError,
    NoSuchEntry,
    NoSuchVariable,
    NotAMessage,
    Rewritten,
    State,
    TextQueue,
    reserve,
)
from slatemq.textqueue.editing import fitted
from slatemq.textqueue.entries import Variable


def queue_of(path: Path, content: bytes) -> TextQueue:
    path.write_bytes(content)
    return TextQueue(path)


def changed(before: bytes, after: bytes) -> list[int]:
    assert len(before) == len(after)
    return [place for place, pair in enumerate(zip(before, after, strict=True)) if len({*pair}) > 1]


@pytest.mark.parametrize(("method", "control"), [("done", b"="), ("fail", b"!")])
def test_marking_changes_one_byte(path: Path, method: str, control: bytes) -> None:
    # Given a file with everything in it
    content = "#note\n\n-first\n second é\n\n\\retries=3\n-last".encode()
    queue = queue_of(path, content)
    first, last = queue

    # When its messages are marked, the last one without a newline too
    getattr(queue, method)(first)
    getattr(queue, method)(last)

    # Then their control characters are the only bytes that differ
    after = path.read_bytes()
    assert changed(content, after) == [first.offset, last.offset]
    assert after[first.offset : first.offset + 1] == control
    assert list(queue) == []


@pytest.mark.parametrize("content", [b"=a\n", b"!a\n"])
@pytest.mark.parametrize("method", ["done", "fail"])
def test_what_is_marked_is_never_marked_again(path: Path, content: bytes, method: str) -> None:
    queue = queue_of(path, content + b"\\error=   \n")
    entry = queue.entry(0)

    with pytest.raises(AlreadyMarked, match="at offset 0 is marked"):
        queue.done(entry) if method == "done" else queue.fail(entry, "no")

    assert path.read_bytes() == content + b"\\error=   \n"


@pytest.mark.parametrize("content", [b"#a\n", b"?a\n"])
def test_comments_and_unknown_entries_are_not_marked(path: Path, content: bytes) -> None:
    queue = queue_of(path, content)

    with pytest.raises(NotAMessage):
        queue.done(queue.entry(0))

    assert path.read_bytes() == content


def test_a_variable_is_set_in_its_own_bytes(path: Path) -> None:
    content = b"-a\n b\n\\note=old     \n\\plain  \n#c\n\\x=1\n"
    queue = queue_of(path, content)
    [entry] = queue

    queue.set_variable(entry, "note", "né")
    queue.set_variable(entry, 1, "bare")
    queue.set_variable(queue.entry(content.index(b"#")), "x", "2")

    assert path.read_bytes() == "-a\n b\n\\note=né     \n\\bare   \n#c\n\\x=2\n".encode()


def test_what_does_not_fit_is_refused_with_the_bytes_needed(path: Path) -> None:
    content = b"-a\n\\note=abc\n\\error=12"
    queue = queue_of(path, content)
    [entry] = queue

    with pytest.raises(
        DoesNotFit, match="'note': the value needs 4 bytes, 3 are reserved"
    ) as raised:
        queue.set_variable(entry, "note", "éé")
    with pytest.raises(DoesNotFit, match="needs 3 bytes, 2 are"):
        queue.fail(entry, "123")
    with pytest.raises(BadText):
        queue.set_variable(entry, "note", "a\nb")
    with pytest.raises(NoSuchVariable):
        queue.set_variable(entry, "nothing", "")

    assert (raised.value.needed_bytes, raised.value.reserved_bytes) == (4, 3)
    assert path.read_bytes() == content


def test_a_value_does_not_turn_a_variable_without_a_name_into_one_with_a_name(path: Path) -> None:
    content = b"-a\n\\                \n\\total=  \n"
    queue = queue_of(path, content)
    [entry] = queue

    with pytest.raises(BadText, match="without a name"):
        queue.set_variable(entry, 0, "ann: total=5 ok")
    assert path.read_bytes() == content

    queue.set_variable(entry, "total", "=5")
    assert queue.entry(0).get("total") == "=5"


@given(st.text(st.characters(exclude_characters="\n", codec="utf-8")), st.integers(0, 40))
def test_a_value_that_fits_fills_exactly_what_is_reserved(value: str, width: int) -> None:
    variable = Variable(0, "v", "", 0, width)
    if len(value.encode()) > width:
        with pytest.raises(DoesNotFit):
            fitted(variable, value)
        return

    content = fitted(variable, value)

    assert len(content) == width
    assert content.decode().rstrip(" ") == value.rstrip(" ")


def test_failing_fills_the_error_variable(path: Path) -> None:
    queue = queue_of(path, b"-a\n\\error=       \n-b\n")
    first, second = queue

    queue.fail(first, "E-42")
    queue.fail(second, "E-43")

    assert path.read_bytes() == b"!a\n\\error=E-42   \n!b\n"


@pytest.mark.parametrize("before", [b"", b"-a\n", b"-a", b"\n", b"#c\n\\v"])
def test_appending_supplies_a_missing_newline(path: Path, before: bytes) -> None:
    queue = queue_of(path, before)

    entry = queue.append("new\nlines", {"retries": "03", "error": reserve(3)})

    missing = b"" if before in (b"", b"-a\n", b"\n") else b"\n"
    assert path.read_bytes() == before + missing + b"-new\n lines\n\\retries=03\n\\error=   \n"
    assert queue.entry(entry.offset).raw == entry.raw


def test_the_first_append_makes_the_file(path: Path) -> None:
    assert TextQueue(path, fsync=True).append("a").offset == 0
    assert path.read_bytes() == b"-a\n"


def test_appending_is_one_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a file without a last newline, and an eye on what is written
    queue = queue_of(path, b"-a")
    writes: list[bytes] = []
    write = os.write

    def watched(descriptor: int, content: bytes) -> int:
        writes.append(content)
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", watched)

    queue.append("b\nc")
    queue.append_all(["d", "e"], ["v=  "])

    assert writes == [b"\n-b\n c\n", b"-d\n\\v=  \n-e\n\\v=  \n"]


def test_a_write_that_the_disk_cuts_short_is_taken_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = queue_of(path, b"-a\n")
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:2]))

    with pytest.raises(OSError, match="only 2 of 5 bytes"):
        queue.append("abc")

    assert path.read_bytes() == b"-a\n"


def test_fsync_comes_before_the_return_if_wanted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bytes] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(path.read_bytes())

    monkeypatch.setattr(os, "fsync", watched)
    queue, lazy = TextQueue(path, fsync=True), TextQueue(path)

    entry = queue.append("a", ["v= "])
    queue.set_variable(entry, "v", "1")
    queue.done(entry)
    count = len(synced)
    lazy.append("b")
    Path(f"{path}.appended").unlink()
    path.write_bytes(b"-c\n\\retries=0\n")
    assert queue.claim() is None

    # Then what each call wrote was there at its sync: the first also synced the folder
    assert synced[:count] == [b"-a\n\\v= \n"] * 2 + [b"-a\n\\v=1\n", b"=a\n\\v=1\n"]
    # And no other's, but for that of a message whose retries a claim found used up
    assert synced[count:] == [b"!c\n\\retries=0\n"]


def test_a_reader_holds_back_what_may_still_be_written(path: Path) -> None:
    # Given a writer without our lock in the middle of a message
    queue = queue_of(path, b"-a\n-half of a mess")

    # Then what it writes is not given, until another entry follows
    assert [entry.text for entry in queue.entries(hold_back=True)] == ["a"]
    path.write_bytes(b"-a\n-half of a message\n more\n-c\n")
    assert [entry.text for entry in queue.entries(hold_back=True)] == [
        "a",
        "half of a message\nmore",
    ]


def test_a_reader_waits_for_the_append_that_is_under_way(path: Path) -> None:
    # Given a writer that has the lock and has written half of a message
    queue = queue_of(path, b"-a\n")
    other, read, seen = TextQueue(path), threading.Event(), []

    def reader() -> None:
        for entry in other:
            seen.append(entry.text)
            read.set()

    with queue.lock():
        with path.open("ab", buffering=0) as file:
            file.write(b"-half")
        thread = threading.Thread(target=reader)
        thread.start()
        # When a reader has come to it, and the writer goes on
        assert read.wait(60)
        assert seen == ["a"]
        with path.open("ab", buffering=0) as file:
            file.write(b" of it\n rest\n")
    thread.join(60)

    # Then the reader got it whole
    assert seen == ["a", "half of it\nrest"]


def test_the_lock_is_for_one_and_may_be_entered_again(path: Path) -> None:
    queue, other = TextQueue(path), TextQueue(path)

    with queue.lock(), queue.lock(wait=False):
        first = queue.append("a")
        assert [entry.text for entry in queue] == ["a"]
        queue.done(first)
        assert queue.claim() is None
        queue.append("b")
        assert queue.compact().removed_count == 1
        with pytest.raises(Busy), other.lock(wait=False):
            pass

    with other.lock(wait=False):
        assert path.read_bytes() == b"-b\n"


def test_an_entry_that_was_moved_is_not_written_to(path: Path) -> None:
    # Given entries that were read before an editor put a line above them
    queue = queue_of(path, b"-a\n\\v=1\n-b\n")
    entries = list(queue)
    path.write_bytes(b"#new\n-a\n\\v=1\n-b\n")

    for entry in entries:
        with pytest.raises(Rewritten):
            queue.done(entry)
        with pytest.raises(Rewritten):
            queue.set_variable(entry, 0, "2")

    assert path.read_bytes() == b"#new\n-a\n\\v=1\n-b\n"


@pytest.mark.parametrize("offset", [-1, 1, 3, 5, 9, 99])
def test_no_entry_begins_in_the_middle_of_one(path: Path, offset: int) -> None:
    queue = queue_of(path, b"-a\n b\n\\v\n")

    with pytest.raises(NoSuchEntry):
        queue.entry(offset)


def test_an_error_in_an_entry_read_alone_names_its_line(path: Path) -> None:
    queue = queue_of(path, b"-a\n\n-b\n \xff\n")

    with pytest.raises(FormatError, match=r"jobs\.tq:4:2: not UTF-8"):
        queue.entry(4)


def test_different_messages_are_marked_at_once(path: Path) -> None:
    # Given many messages, and threads that mark every one of them together
    path.write_bytes(b"-a\n" * 400)
    queue = TextQueue(path)
    entries, won, barrier = list(queue), [], threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        for entry in entries:
            try:
                queue.done(entry)
                won.append(entry.offset)
            except AlreadyMarked:
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    # Then each was marked once
    assert sorted(won) == [entry.offset for entry in entries]
    assert path.read_bytes() == b"=a\n" * 400


def test_reading_goes_by_state(path: Path) -> None:
    queue = queue_of(path, b"-a\n=b\n!c\n#d\n?e\n-f\n")

    assert [entry.text for entry in queue] == ["a", "f"]
    assert [entry.text for entry in queue.entries(State.ERROR, State.PROCESSED)] == ["b", "c"]
    assert [entry.text for entry in queue.entries(*State)] == ["a", "b", "c", "d", "e", "f"]
    with pytest.raises(FormatError, match="unknown control"):
        list(TextQueue(path, strict=True))


def test_states_go_by_name_too_and_others_are_refused(path: Path) -> None:
    queue = queue_of(path, b"-a\n?b\n")

    names: Any = ["unknown", "queued"]
    assert [entry.text for entry in queue.entries(*names)] == ["a", "b"]
    assert list(queue.texts(*names)) == ["a", "b"]
    unheard: Any = "waiting"
    for ask in (queue.entries, queue.texts):
        with pytest.raises(ValueError, match=r"a state must be one of .*, not 'waiting'"):
            ask(unheard)


def test_a_single_text_is_not_taken_for_its_characters(path: Path) -> None:
    queue = TextQueue(path)

    with pytest.raises(TypeError, match="variables must be several texts, not a single one"):
        queue.append("a", "mutex=    ")
    with pytest.raises(TypeError, match="variables must be"):
        queue.append_all(["a"], "mutex=    ")
    with pytest.raises(TypeError, match="texts must be"):
        queue.append_all("resize photo 7")

    assert not path.exists()


def test_a_link_stays_a_link(path: Path) -> None:
    link = path.with_name("link.tq")
    link.symlink_to(path)
    queue = queue_of(path, b"=a\n-b\n")

    TextQueue(link).compact()

    assert link.is_symlink()
    assert path.read_bytes() == b"-b\n"
    assert isinstance(queue.append("c"), Entry)
