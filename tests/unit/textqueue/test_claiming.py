"""Claims: one worker for each message, whatever becomes of workers, clocks and the file."""

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from slatemq.textqueue import (
    AlreadyMarked,
    ClaimLost,
    Entry,
    FormatError,
    Rewritten,
    TextQueue,
    claiming,
)
from slatemq.textqueue.editing import again
from slatemq.textqueue.holders import SLOT_BYTES, Holder, Holders, start_of, this_place
from tests.unit.textqueue.claims import NOBODY, Clock, Make, claims, taken


def test_each_message_goes_to_one(path: Path, make: Make, clock: Clock) -> None:
    first = make(b"-a\n=b\n-c\n#d\n-e\n")
    second = TextQueue(path, clock_ms=clock)

    got = [queue.claim() for queue in (first, second, first, second)]

    assert [claim and claim.text for claim in got] == ["a", "c", "e", None]


def test_leaving_marks_done_and_an_exception_gives_back(path: Path, make: Make) -> None:
    queue = make(b"-a\n-b\n")

    with pytest.raises(RuntimeError, match="boom"), taken(queue):
        raise RuntimeError("boom")
    with taken(queue) as claim:
        assert claim.text == "a"
    with taken(queue) as claim:
        claim.fail()

    assert path.read_bytes() == b"=a\n!b\n"
    assert Path(f"{path}.mutex").read_bytes().strip() == b""


def test_a_claim_that_ran_out_of_time_goes_to_another(path: Path, make: Make, clock: Clock) -> None:
    # Given a claim of a minute
    queue, other = make(b"-a\n"), TextQueue(path, clock_ms=clock)
    lost = queue.claim(timedelta(minutes=1))
    assert lost is not None
    clock.now_ms += 59_999
    assert other.claim() is None

    # When the minute is over
    clock.now_ms += 1
    taken = other.claim()

    # Then another gets it, and the first is told so
    assert taken is not None
    with pytest.raises(ClaimLost):
        lost.done()
    with pytest.raises(ClaimLost):
        lost.extend()
    taken.done()
    assert path.read_bytes() == b"=a\n"


def test_a_late_claim_that_was_not_taken_still_counts(path: Path, make: Make, clock: Clock) -> None:
    claim = make(b"-a\n").claim()
    assert claim is not None
    clock.now_ms += 10**9

    claim.done()

    assert path.read_bytes() == b"=a\n"


def test_a_lease_that_is_over_at_once_is_refused(path: Path, make: Make) -> None:
    with pytest.raises(ValueError, match="lease must be a millisecond or more"):
        make(b"-a\n").claim(timedelta(0))


def test_an_extended_claim_lasts(path: Path, make: Make, clock: Clock) -> None:
    queue = make(b"-a\n")
    claim = queue.claim(timedelta(seconds=10))
    assert claim is not None
    clock.now_ms += 9_000
    claim.extend(timedelta(seconds=10))
    clock.now_ms += 9_000

    assert TextQueue(path, clock_ms=clock).claim() is None
    assert claim.deadline_ms == clock.now_ms + 1_000


def test_a_claim_of_a_process_that_ended_is_given_again(path: Path, make: Make) -> None:
    # Given a process that claims and ends without a word
    queue = make(b"-a\n\\mutex=      \n-b\n")
    program = f"from slatemq.textqueue import TextQueue; TextQueue({str(path)!r}).claim()"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert b"\\mutex=@" in path.read_bytes()

    # Then its message comes first, long before its deadline
    with taken(queue) as claim:
        assert claim.text == "a"
    assert path.read_bytes() == b"=a\n\\mutex=      \n-b\n"


def test_a_process_that_ends_after_it_has_marked_its_message_leaves_no_slot_taken(
    path: Path, make: Make
) -> None:
    # Given a process that ends between marking its message and freeing its slot
    make(b"-a\n")
    program = (
        "import os\n"
        "from slatemq.textqueue import TextQueue, holders\n"
        "holders.Holders.drop = lambda *_: os._exit(9)\n"
        f"TextQueue({str(path)!r}).claim().done()"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    sidecar = Path(f"{path}.mutex")
    assert (path.read_bytes(), sidecar.read_bytes().strip() != b"") == (b"=a\n", True)

    # When another, which has never seen the message queued, looks for one
    assert TextQueue(path).claim() is None

    # Then the slot is free
    assert sidecar.read_bytes().strip() == b""


def test_a_claim_for_another_process_outlives_its_own(path: Path, make: Make) -> None:
    queue = make(b"-a\n")
    program = (
        "from slatemq.textqueue import TextQueue;"
        f"print(TextQueue({str(path)!r}, clock_ms=lambda: {queue._clock_ms()})"
        ".claim(tied=False).token)"
    )
    token = subprocess.check_output([sys.executable, "-c", program], text=True).strip()

    assert queue.claim() is None
    queue.claimed(token).done()

    assert path.read_bytes() == b"=a\n"
    with pytest.raises(ClaimLost):
        queue.claimed(token)


def test_a_process_number_used_again_is_no_life(make: Make) -> None:
    started = start_of(os.getpid())
    ours = Holder(0, "", "@", "", this_place(), os.getpid(), started, 10)
    earlier = Holder(0, "", "@", "", this_place(), os.getpid(), started - 1, 10)
    elsewhere = Holder(0, "", "@", "", "another", 2**30, 5, 10)

    assert [one.state(9).value for one in (ours, earlier, elsewhere)] == [
        "alive",
        "crashed",
        "alive",
    ]
    assert elsewhere.state(10).value == "timed out"


def test_the_start_of_a_process_is_known_whose_name_is_cut_within_a_character() -> None:
    name = bytes([*b"x" * 14, 0xC3])
    code = f"import sys; open('/proc/self/comm', 'wb').write({name!r}); print(flush=True); "
    command = [sys.executable, "-c", code + "sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()

        assert start_of(process.pid) > 0

        process.communicate()


def test_what_a_person_marked_meanwhile_is_reported(path: Path, make: Make) -> None:
    claim = make(b"-a\n").claim()
    assert claim is not None
    path.write_bytes(b"=a\n")

    with pytest.raises(AlreadyMarked):
        claim.done()


@pytest.mark.parametrize("by_token", [False, True])
def test_an_editor_that_moves_a_claimed_message_is_found_out(
    path: Path, make: Make, clock: Clock, by_token: bool
) -> None:
    # Given a claim, and an editor that writes a message above it
    queue, other = make(b"-a\n-b\n"), TextQueue(path, clock_ms=clock)
    claim = queue.claim()
    assert claim is not None
    path.write_bytes(b"-new\n-a\n-b\n")

    # Then no one else gets the message while it is worked on
    assert claims(other) == ["new", "b"]
    # And its worker is reported, after which it comes again
    with pytest.raises(Rewritten):
        other.claimed(claim.token) if by_token else claim.done()
    assert claims(queue) == ["a"]
    assert path.read_bytes() == b"-new\n-a\n-b\n"


@pytest.mark.parametrize("in_place", [True, False])
def test_what_an_editor_changes_is_seen(path: Path, make: Make, in_place: bool) -> None:
    # Given a queue that was read to its end
    queue = make(b"=a\n!b\n-c\n")
    assert claims(queue) == ["c"]

    # When an editor puts messages back, without and with a change of place
    for content, expected in ((b"=a\n-b\n-c\n", ["b"]), (b"-d\n=a\n!b\n-c\n", ["d"])):
        if in_place:
            path.write_bytes(content)
        else:
            beside = path.with_name("new")
            beside.write_bytes(content)
            beside.replace(path)

        # Then they are claimed, and what is held stays with its holder
        assert claims(queue) == expected


def test_a_queue_that_grows_is_followed(path: Path, make: Make) -> None:
    queue = make(b"")
    assert queue.claim() is None

    for number in range(3):
        queue.append(f"m{number}")
        assert claims(queue) == [f"m{number}"]


def test_a_broken_line_stops_only_what_is_behind_it(path: Path, make: Make) -> None:
    queue = make(b"-a\n-b\n-c\xff\n-d\n")

    assert [claim.text for claim in (queue.claim(), queue.claim()) if claim] == ["a", "b"]
    with pytest.raises(FormatError, match=r"jobs\.tq:3:3"):
        queue.claim()


def test_same_texts_are_different_messages(path: Path, make: Make, clock: Clock) -> None:
    queue, other = make(b"-tick\n" * 5), TextQueue(path, clock_ms=clock)

    taken = [claim for claim in (queue.claim(), other.claim()) if claim]
    assert len(claims(other)) == 3
    for claim in taken:
        claim.done()

    assert path.read_bytes() == b"=tick\n" * 2 + b"-tick\n" * 3


def test_a_damaged_sidecar_holds_nothing(path: Path, make: Make) -> None:
    queue = make(b"-a\n")
    holder = {"offset": 0, "digest": "", "token": 5}
    Path(f"{path}.mutex").write_bytes(
        b"\x00" * SLOT_BYTES + json.dumps(holder).encode().ljust(SLOT_BYTES) + b"{"
    )

    assert claims(queue) == ["a"]


@pytest.mark.parametrize("owner", ['"\\é\n', "\x01", "\x7f", "北"])
def test_a_slot_has_room_for_the_longest_holder(path: Path, owner: str) -> None:
    path.write_bytes(b"-a\n")
    queue = TextQueue(path, owner=owner * 100)

    claim = queue.claim()

    assert claim is not None
    with path.with_name("jobs.tq.mutex").open("rb") as file:
        assert [one.token for one in Holders(file.fileno())] == [claim.token]


def test_a_queue_that_does_not_exist_leaves_nothing_behind(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TextQueue(path).claim()

    assert list(path.parent.iterdir()) == []


def test_what_others_hold_is_not_read_again_for_each_claim(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given many messages that are worked on
    queue, looks = make(b"".join(b"-%d\n" % number for number in range(101))), list[Entry]()
    held = [taken(queue) for _ in range(100)]

    def counting(descriptor: int, entry: Entry) -> Entry:
        looks.append(entry)
        return again(descriptor, entry)

    monkeypatch.setattr(claiming, "again", counting)

    # When one more is claimed, then that one alone is looked at
    assert taken(queue).text == "100"
    assert len(looks) == 1
    # And what is given back is found
    held[50].release()
    assert taken(queue).text == "50"


@pytest.mark.parametrize(
    "call", [TextQueue.claim, TextQueue.compact, list, lambda queue: queue.append("x")]
)
@pytest.mark.parametrize("kind", ["folder", "pipe", "link to itself"])
def test_what_is_no_file_is_named_and_gets_nothing_beside_it(
    path: Path, call: Callable[[TextQueue], object], kind: str
) -> None:
    if kind == "link to itself":
        path.symlink_to(path)
    else:
        path.mkdir() if kind == "folder" else os.mkfifo(path)

    with pytest.raises(OSError, match=r"directory|regular file|symbolic links") as raised:
        call(TextQueue(path))

    assert raised.value.filename == str(path)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666, 0o444])
def test_what_is_beside_a_queue_is_for_those_whom_that_is_for(path: Path, mode: int) -> None:
    # Given a queue file for some people, whoever works on it first
    path.write_bytes(b"-a\n")
    path.chmod(mode)
    queue = TextQueue(path)
    is_root = os.geteuid() == 0
    if is_root:
        os.chown(path, NOBODY, NOBODY)
    elif mode == 0o444:
        pytest.skip("only root writes what is read-only")

    with queue.lock():
        queue.append("b")
    taken(queue).done()

    for name in (f"{path}.mutex", f"{path}.appended"):
        result = os.stat(name)
        assert stat.S_IMODE(result.st_mode) == mode | 0o600
        assert (result.st_uid, result.st_gid) == (NOBODY, NOBODY) or not is_root
    # And so it is when others are let in later
    if is_root:
        os.chown(path, 0, 0)
        for name in (f"{path}.mutex", f"{path}.appended"):
            os.chown(name, 0, 0)
    path.chmod(0o640)
    queue.append("c")
    taken(queue).done()
    assert {stat.S_IMODE(one.stat().st_mode) for one in path.parent.iterdir()} == {0o640}


def test_threads_that_claim_and_one_that_has_the_lock_do_not_wait_for_ever(make: Make) -> None:
    # Given the whole file locked, and another thread that wants to claim
    queue, got = make(b"-a\n-b\n"), list[str]()
    other = threading.Thread(target=lambda: got.append(taken(queue).text), daemon=True)
    with queue.lock():
        other.start()

        # When the one that has the lock claims too
        assert taken(queue).text == "a"

    # Then both get their message
    other.join(60)
    assert got == ["b"]


def test_whose_messages_are_claimed_is_reported_by_their_places(make: Make, clock: Clock) -> None:
    queue = make(b"-a\n-b\n-c\n")
    first, second = taken(queue), taken(TextQueue(queue.path, clock_ms=clock))

    assert queue.claimed_offsets() == {0, 3}
    first.release()
    with queue.lock():
        assert queue.claimed_offsets() == {3}
    clock.now_ms = second.deadline_ms
    assert queue.claimed_offsets() == frozenset()
