"""Appends that an editor's save takes away are missed, and told once."""

import os
import resource
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slatemq.textqueue import AppendLost, TextQueue, appends
from slatemq.textqueue.appends import LINE_BYTES_MAX, ROOM_BYTES
from tests.unit.textqueue.claims import as_a_reader, claims


def save(path: Path, content: bytes, in_place: bool) -> None:
    if in_place:
        path.write_bytes(content)
        return
    beside = path.with_name("new")
    beside.write_bytes(content)
    beside.replace(path)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("call", ["append", "claim", "compact", "has_all_appends"])
def test_an_append_that_a_save_took_away_is_reported_once(
    path: Path, call: str, in_place: bool
) -> None:
    # Given an editor that reads the file, two appends, and the editor saving what it had
    queue = TextQueue(path)
    queue.append("kept")
    older = path.read_bytes()
    TextQueue(path).append("lost one")
    TextQueue(path).append_all(["a", "lost two"])
    save(path, b"#edited\n" + older, in_place)

    # When the next one comes, then it is reported, and its call is done all the same
    with pytest.warns(AppendLost, match="3 appended messages .*'lost one' at offset 6") as warns:
        result = queue.append("next") if call == "append" else getattr(queue, call)()
    [warning] = warns
    assert isinstance(warning.message, AppendLost)
    assert warning.message.appends == ((6, "lost one"), (19, "lost two"))
    assert result is not None
    # And no one is told again (a warning is an error here)
    assert TextQueue(path).has_all_appends()
    claims(queue)


def test_what_was_marked_moved_set_or_commented_out_is_not_missed(path: Path) -> None:
    queue = TextQueue(path)
    queue.append("a", {"v": "1"})
    last = queue.append("b\nc", {"v": "1"})
    queue.set_variable(last, "v", "2")
    queue.done(last)
    assert queue.has_all_appends()

    for content in (b"#new\n" + path.read_bytes(), b"#b\n c\n\\v=2\n-a\n", b"-b\n c\n"):
        save(path, content, False)
        assert queue.has_all_appends()


def test_a_save_in_the_midst_of_an_append_is_reported_by_the_next_call(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an editor that saves an older copy after the append has looked, and before it writes
    queue = TextQueue(path)
    queue.append("kept")
    older = path.read_bytes()
    queue.append("lost")
    write = os.write

    def save_before(descriptor: int, content: bytes) -> int:
        monkeypatch.undo()
        path.write_bytes(older)
        return write(descriptor, content)

    monkeypatch.setattr("os.write", save_before)
    queue.append("next")

    with pytest.warns(AppendLost, match="1 appended messages .*'lost'"):
        assert not queue.has_all_appends()
    assert queue.has_all_appends()
    assert claims(queue) == ["kept", "next"]


@pytest.mark.parametrize("meanwhile", ["unreadable", "empty"])
def test_an_append_amid_a_save_hides_no_loss(
    path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    # Given an editor that has emptied the file when an append writes
    queue = TextQueue(path)
    queue.append("kept one")
    queue.append("kept two")
    older = path.read_bytes()
    for text in ("lost one", "lost two"):
        queue.append(text)
    write = os.write

    def empty_before(descriptor: int, content: bytes) -> int:
        monkeypatch.undo()
        path.write_bytes(b"")
        if meanwhile == "unreadable":
            # Half of the editor's bytes are there, before ours.
            os.pwrite(descriptor, b"   of what was there before\n" * 2, 0)
        return write(descriptor, content)

    monkeypatch.setattr("os.write", empty_before)
    queue.append("amid")

    # When its content has come, with the append behind it or over it, then all that is gone is
    # reported, and nothing else
    is_there = meanwhile == "unreadable"
    path.write_bytes(older + (b"-amid\n" if is_there else b""))
    with pytest.warns(AppendLost) as warns:
        assert not queue.has_all_appends()
    [warning] = warns
    assert isinstance(warning.message, AppendLost)
    lost = ["lost one", "lost two", *([] if is_there else ["amid"])]
    assert [start for _, start in warning.message.appends] == lost
    assert queue.has_all_appends()
    # And from then on as ever
    queue.append("next")
    path.write_bytes(older)
    with pytest.warns(AppendLost) as warns:
        queue.has_all_appends()
    [warning] = warns
    assert isinstance(warning.message, AppendLost)
    assert [start for _, start in warning.message.appends] == [*["amid"] * is_there, "next"]


def test_what_was_removed_on_purpose_is_not_missed_after_an_append_amid_a_save(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given appends that a person has removed, one that proves so, and an append amid a save
    queue = TextQueue(path)
    for number in range(5):
        queue.append(f"done {number}")
    queue.append("last")
    path.write_bytes(content := b"-last\n")
    assert queue.has_all_appends()
    write = os.write

    def amid_a_save(descriptor: int, content: bytes) -> int:
        monkeypatch.undo()
        path.write_bytes(b"   of what is being saved\n")
        return write(descriptor, content)

    monkeypatch.setattr("os.write", amid_a_save)
    queue.append("amid")

    # When the save has ended, and nothing was lost by it
    path.write_bytes(content + b"-amid\n")

    # Then nothing is missed (a warning is an error here)
    assert queue.has_all_appends()


@pytest.mark.parametrize("has_read", ["before", "after"])
def test_an_append_beside_a_save_is_there_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, has_read: str
) -> None:
    # Given an editor that puts a new file in place just when an append has written
    queue = TextQueue(path)
    queue.append("same")
    write = os.write

    def write_and_save(descriptor: int, content: bytes) -> int:
        monkeypatch.undo()
        older = path.read_bytes()
        written = write(descriptor, content)
        save(path, b"#edited\n" + (older if has_read == "before" else path.read_bytes()), False)
        return written

    # When it had read the file before the append's bytes were there, or after
    monkeypatch.setattr("os.write", write_and_save)
    queue.append_all(["other", "same"])

    # Then they are there, and not twice; what was appended is where the library says
    assert [entry.text for entry in queue] == ["same", "other", "same"]
    assert queue.has_all_appends()
    added = queue.append("next")
    assert queue.entry(added.offset).text == "next"
    assert claims(queue) == ["same", "other", "same", "next"]


def test_what_an_editor_has_moved_is_found_at_the_end_though_the_rest_is_unreadable(
    path: Path,
) -> None:
    queue = TextQueue(path)
    queue.append("a")
    queue.append("b\n\nc", {"v": "1"})
    save(path, b"#\xff\n" + path.read_bytes(), False)

    assert queue.has_all_appends()

    # Then it is known to be there from now on
    newest = Path(f"{path}.appended").read_text().splitlines()[-1]
    assert newest.startswith("[6, ")
    # And the one before it is missed when it is not
    save(path, b"-a\n", False)
    with pytest.warns(AppendLost, match="1 appended messages .*'b"):
        queue.has_all_appends()


def test_of_texts_that_are_the_same_all_are_missed(path: Path) -> None:
    queue = TextQueue(path)
    for _ in range(3):
        queue.append("tick")
    older = path.read_bytes()
    queue.append("tock")
    queue.append("tick")
    save(path, b"#\n" + older, False)

    with pytest.warns(AppendLost, match="2 appended messages"):
        assert not queue.has_all_appends()


def test_what_a_compaction_leaves_out_is_not_missed(path: Path) -> None:
    queue = TextQueue(path)
    queue.append("a")
    queue.done(queue.append("b"))
    queue.compact()
    assert queue.has_all_appends()
    queue.append("c")
    # But a copy from before what is kept is found out
    save(path, b"#nothing\n", True)

    with pytest.warns(AppendLost, match="2 appended messages .*'a' at offset 0, 'c' at offset 3"):
        queue.has_all_appends()


def test_what_a_compaction_keeps_is_still_missed(path: Path) -> None:
    # Given an editor that reads the file, appends, and a compaction that moves them
    queue = TextQueue(path)
    for text in ("kept", "done"):
        last = queue.append(text)
    older = path.read_bytes()
    queue.append("one")
    queue.append_all(["two", "alike"])
    queue.append("alike")
    queue.done(last)
    for entry in queue:
        if entry.text == "two":
            queue.done(entry)
    queue.compact()
    assert queue.has_all_appends()

    # When the editor saves what it had
    save(path, older, True)

    # Then all of them are reported, where they were
    with pytest.warns(AppendLost, match="4 appended messages") as warns:
        assert not queue.has_all_appends()
    [warning] = warns
    assert isinstance(warning.message, AppendLost)
    assert [start for _, start in warning.message.appends] == ["one", "alike", "alike"]
    assert warning.message.appends[0] == (6, "one")
    assert queue.has_all_appends()


def test_a_file_that_was_deleted_starts_over(path: Path) -> None:
    queue = TextQueue(path)
    queue.append("a")
    path.unlink()

    queue.append("b")

    assert queue.has_all_appends()


def test_of_two_that_make_the_file_at_once_both_appends_are_missed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given another process that makes the file just after this one has found none
    def find_none(name: str) -> bool:
        monkeypatch.undo()
        TextQueue(path).append("first")
        return False

    monkeypatch.setattr(os.path, "lexists", find_none)
    queue = TextQueue(path)
    queue.append("second")

    # When both are lost, then both are told
    path.write_bytes(b"")
    with pytest.warns(AppendLost, match="2 appended .*'first' at offset 0, 'second' at offset 7"):
        queue.has_all_appends()


def test_a_broken_file_is_looked_at_again_when_it_is_repaired(path: Path) -> None:
    queue = TextQueue(path)
    queue.append("a")
    path.write_bytes(b"-b\xff\n")
    assert queue.has_all_appends()
    path.write_bytes(b"-b\n")

    with pytest.warns(AppendLost, match="1 appended"):
        queue.has_all_appends()


def test_a_save_under_way_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an editor that has emptied the file, and writes it while we wait
    queue = TextQueue(path)
    queue.append("a")
    content = path.read_bytes()
    path.write_bytes(b"")
    monkeypatch.setattr("time.sleep", lambda _: path.write_bytes(b"#new\n" + content))

    assert queue.has_all_appends()


def test_the_list_stays_short_and_may_be_damaged(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a list that is to have no more than a few lines
    monkeypatch.setattr(appends, "LOG_BYTES_MAX", 500)
    queue, listed = TextQueue(path), Path(f"{path}.appended")
    for number in range(50):
        queue.append(f"\U0001f600 message {number} " + "\U0001f600" * 100)
    assert listed.stat().st_size < 500 + 2 * LINE_BYTES_MAX

    # Then it still reports what is gone, also with rubbish in it
    with listed.open("ab") as file:
        file.write(b"\x00\xff\n[1]\n{}\n[1, 2, 3, 4, 5]\n[0, ")
    save(path, path.read_bytes().partition(b"message 49")[0].rpartition(b"\n")[0] + b"\n", False)
    with pytest.warns(AppendLost, match="1 appended messages .* message 49"):
        queue.has_all_appends()


def test_programs_may_take_the_warning_as_an_error(path: Path) -> None:
    queue = TextQueue(path)
    queue.append("a")
    path.write_bytes(b"")

    with warnings.catch_warnings():
        warnings.simplefilter("error", AppendLost)
        with pytest.raises(AppendLost):
            queue.append("b")

    # Then nothing was done, nothing is held, and the next call goes on
    assert os.path.getsize(path) == 0
    queue.append("b")
    assert path.read_bytes() == b"-b\n"


def test_an_append_that_cannot_be_listed_is_refused_and_leaves_nothing(path: Path) -> None:
    # Given something else in the place of the list
    path.write_bytes(b"-one")
    Path(f"{path}.appended").mkdir()

    with pytest.raises(IsADirectoryError):
        TextQueue(path).append("two")

    assert path.read_bytes() == b"-one"


FACES = "\U0001f600" * appends.START_LENGTH
"""A text of which the list has as much as of any."""


@pytest.mark.parametrize("room", [0, 1, 30, 300, 600])
def test_an_append_whose_line_in_the_list_does_not_fit_on_the_disk_has_not_happened(
    path: Path, room: int
) -> None:
    # Given a list that can grow no more, or by a part of a line, and a file that can
    queue = TextQueue(path)
    queue.append("one")
    listed = Path(f"{path}.appended")
    listed.write_bytes(listed.read_bytes() * 100)
    content = listed.read_bytes()
    with files_up_to(len(content) + room), pytest.raises(OSError, match=r"File too large|only \d+"):
        queue.append(FACES)

    # Then it is not there, and the list is as it was
    assert path.read_bytes() == b"-one\n"
    assert listed.read_bytes() == content
    queue.append("two")
    assert queue.has_all_appends()


def test_an_append_has_room_for_its_line_in_the_list_before_it_is_written(path: Path) -> None:
    # Given a list that can grow by no more than the line that it has while an append is under way
    queue = TextQueue(path)
    queue.append("one")
    with files_up_to(os.path.getsize(f"{path}.appended") + ROOM_BYTES + 1):
        queue.append(FACES)

    path.write_bytes(b"-one\n")

    with pytest.warns(AppendLost, match=FACES):
        queue.has_all_appends()


def test_a_list_that_cannot_be_rewritten_is_as_it_was(path: Path) -> None:
    # Given an append that a save took away, and a disk that takes only a part of the new list
    queue = TextQueue(path)
    for text in ("one", "two", "three"):
        queue.append(text)
    path.write_bytes(b"#new\n-one\n-two\n")
    listed = Path(f"{path}.appended").read_bytes()
    with files_up_to(60), pytest.raises(OSError, match="only 60 of"):
        queue.has_all_appends()

    # Then nothing of it has changed, and the next look tells
    assert Path(f"{path}.appended").read_bytes() == listed
    with pytest.warns(AppendLost, match="1 appended messages .*'three'"):
        queue.has_all_appends()


def test_a_variable_of_which_the_disk_takes_a_part_is_as_it_was(path: Path) -> None:
    queue = TextQueue(path)
    entry = queue.append("one", {"v": "before"})
    with files_up_to(entry.end - 4), pytest.raises(OSError, match="only 3 of 6"):
        queue.set_variable(entry, "v", "after ")

    assert path.read_bytes() == b"-one\n\\v=before\n"


def test_a_claim_whose_slot_does_not_fit_on_the_disk_has_not_happened(path: Path) -> None:
    queue = TextQueue(path)
    queue.append("one")
    with files_up_to(300), pytest.raises(OSError, match="only 300 of 512"):
        queue.claim()

    claim = queue.claim()

    assert claim is not None
    claim.done()


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file can grow beyond."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_reader_without_the_right_to_write_learns_of_losses_each_time() -> None:
    # Given files that are someone else's, and a save that took an append away
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "jobs.tq")
        os.chmod(folder, 0o755)
        queue = TextQueue(path)
        queue.append("one")
        queue.append("two")
        with as_a_reader(path, Path(f"{path}.appended")):
            assert queue.has_all_appends()
        save(path, b"-one\n", True)

        # When they look twice, and the owner does
        for _ in range(2):
            with (
                as_a_reader(path, Path(f"{path}.appended")),
                pytest.warns(AppendLost, match="'two' at offset 5"),
            ):
                assert not queue.has_all_appends()
        with pytest.warns(AppendLost, match="'two' at offset 5"):
            assert not queue.has_all_appends()

        # Then no one is told any more
        assert queue.has_all_appends()
