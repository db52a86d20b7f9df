"""Compacting a file: what is kept, and what becomes of claims."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slatemq.textqueue import Claim, ClaimLost, FormatError, Rewritten, TextQueue
from tests.unit.textqueue.claims import Clock, Make, claims, taken


def test_compacting_keeps_claims_and_all_that_is_not_finished(path: Path, make: Make) -> None:
    # Given finished messages above and below two claimed ones
    content = b"\n#note\n\\v=1\n\n=a\n\\x=1\n-b\n c\n?d\n e\n!f\n=g\n-h\n\\mutex=    \n=i"
    queue = make(content)
    claimed = [queue.claim(), queue.claim()]

    # When the file is compacted
    done = queue.compact()

    # Then what is finished is gone, all else is as it was, and the claims hold
    held = path.read_bytes()
    assert held.startswith(b"\n#note\n\\v=1\n\n-b\n c\n?d\n e\n!f\n-h\n\\mutex=@")
    assert (done.kept_count, done.removed_count) == (5, 3)
    assert (done.bytes_before, done.bytes_after) == (len(content), len(held))
    assert queue.claim() is None
    for claim in claimed:
        assert claim is not None
        claim.set_variable("mutex", "me") if claim.text == "h" else None
        claim.done()
    assert path.read_bytes() == b"\n#note\n\\v=1\n\n=b\n c\n?d\n e\n!f\n=h\n\\mutex=me  \n"
    # And errors go too if wanted
    assert queue.compact(errors=True).removed_count == 3
    assert path.read_bytes() == b"\n#note\n\\v=1\n\n?d\n e\n"


def test_compacting_clears_what_ended_claims_have_left(
    path: Path, make: Make, clock: Clock
) -> None:
    # Given a claim whose message an editor has taken out, and which has run out of time
    queue = make(b"-a\n-b\n")
    taken(queue)
    path.write_bytes(b"-b\n")
    clock.now_ms += 10**9
    sidecar = Path(f"{path}.mutex")
    assert sidecar.read_bytes().strip()

    queue.compact()

    assert sidecar.read_bytes().strip() == b""
    assert claims(queue) == ["b"]


def test_a_broken_file_is_not_compacted(path: Path, make: Make) -> None:
    queue = make(b"=a\n-b\xff\n")

    with pytest.raises(FormatError):
        queue.compact()

    assert path.read_bytes() == b"=a\n-b\xff\n"
    assert {one.name for one in path.parent.iterdir()} == {"jobs.tq", "jobs.tq.mutex"}


def test_a_claim_of_a_removed_message_does_not_hold_an_equal_one(path: Path, make: Make) -> None:
    # Given two equal texts, the first of them claimed, and marked by a person
    queue = make(b"-tick\n\\n=1\n-tick\n\\n=2\n")
    first = taken(queue)
    queue.done(queue.entry(0))

    # When a compaction removes it, so that the second comes to its offset
    queue.compact()

    # Then the second is claimed by another, and the worker of the first cannot mark it
    with pytest.raises(ClaimLost):
        first.done()
    second = taken(TextQueue(path))
    assert second.entry.get("n") == "2"
    second.done()
    assert path.read_bytes() == b"=tick\n\\n=2\n"


@pytest.mark.parametrize(
    "finish", [Claim.done, Claim.release, Claim.extend, lambda claim: claim.set_variable("n", "9")]
)
def test_a_claim_whose_message_an_editor_has_moved_gets_no_equal_one_by_compacting(
    path: Path, make: Make, finish: Callable[[Claim], None]
) -> None:
    # Given a claim whose message an editor has moved
    queue = make(b"-tick\n\\n=1\n")
    claim = taken(queue)
    path.write_bytes(b"=a message\n=b\n-tick\n\\n=1\n")

    # When a compaction puts it to where it was
    queue.compact()
    content = path.read_bytes()
    assert content == b"-tick\n\\n=1\n"

    # Then it is not given to another before its worker is told
    assert (TextQueue(path).claim(), queue.claimed_offsets()) == (None, frozenset())
    with pytest.raises(Rewritten, match=claim.token):
        finish(claim)
    assert path.read_bytes() == content
    assert claims(queue) == ["tick"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_claims_are_where_their_messages_are_when_a_compaction_is_killed(
    path: Path, make: Make, clock: Clock, when: str
) -> None:
    # Given equal texts, the first processed, the second claimed
    queue = make(b"=tick\n\\n=1\n-tick\n\\n=2\n-tick\n\\n=3\n")
    claim = taken(queue)

    # When a compaction is killed before or after its file gets the name
    program = (
        "import os\n"
        "from slatemq.textqueue import TextQueue\n"
        "rename = os.rename\n"
        "def killed(*paths):\n"
        f"    {'rename(*paths)' if when == 'after' else 'pass'}\n"
        "    os._exit(9)\n"
        "os.rename = killed\n"
        f"TextQueue({str(path)!r}, clock_ms=lambda: {clock.now_ms}).compact()"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    before = b"=tick\n\\n=1\n" if when == "before" else b""
    assert path.read_bytes() == before + b"-tick\n\\n=2\n-tick\n\\n=3\n"

    # Then each message is with one worker, and each marks its own
    other = taken(TextQueue(path, clock_ms=clock))
    assert other.entry.get("n") == "3"
    claim.done()
    assert path.read_bytes() == before + b"=tick\n\\n=2\n-tick\n\\n=3\n"
    other.done()


def test_a_compaction_that_cannot_rename_leaves_claims_as_they_are(
    path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make(b"=a\n-b\n")
    claim = taken(queue)

    def refused(*_: object) -> None:
        raise PermissionError("read-only")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refused)
        with pytest.raises(PermissionError):
            queue.compact()

    claim.done()
    assert path.read_bytes() == b"=a\n=b\n"
