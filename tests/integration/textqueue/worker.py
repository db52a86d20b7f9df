"""Processes that share a queue file: `python -m tests.integration.textqueue.worker ROLE PATH …`.

A worker writes what it does into a journal beside the file, one line in one write, so that a kill
at any instant leaves only whole lines; and it has a folder of markers, in which a message that two
work on at a time is found out.
"""

import os
import random
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from slatemq.textqueue import (
    AlreadyMarked,
    AppendLost,
    Claim,
    ClaimLost,
    Entry,
    FormatError,
    Rewritten,
    State,
    TextQueue,
    reserve,
)


class Journal:
    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self, what: str, text: str) -> None:
        os.write(self._descriptor, f"{what} {text.split()[0]}\n".encode())


class Marker:
    """Says that this process works on a message; finds a process that lives and does so too."""

    def __init__(self, path: str, text: str) -> None:
        self._path = Path(path + ".working", text.split()[0])

    def __enter__(self) -> bool:
        try:
            before = self._path.read_text()
        except FileNotFoundError:
            before = ""
        self._path.write_text(str(os.getpid()))
        return before == "" or int(before) == os.getpid() or not lives(int(before))

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)


def lives(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX"


def work(path: str, seed: str) -> None:
    """Works until nothing is queued that others do not work on."""
    queue, journal, chance = TextQueue(path), Journal(path + ".journal"), random.Random(seed)
    idle = 0
    while idle < 20:
        claim = queue.claim(timedelta(minutes=10))
        if claim is None:
            # Others may still give back what they have, or be killed.
            idle += 1
            time.sleep(0.01)
            continue
        idle = 0
        with Marker(path, claim.text) as alone:
            if not alone:
                journal("TWICE", claim.text)
            if chance.random() < 0.5:
                time.sleep(0.001)
        finish(claim, journal, chance)


def finish(claim: Claim, journal: Journal, chance: random.Random) -> None:
    one = chance.random()
    try:
        if one < 0.2:
            claim.release()
        elif one < 0.3:
            claim.fail("E-1")
            journal("failed", claim.text)
        else:
            claim.set_variable("by", str(os.getpid()))
            claim.done()
            journal("done", claim.text)
    except (Rewritten, ClaimLost, AlreadyMarked) as error:
        journal(type(error).__name__, claim.text)


def write(path: str, name: str, count: str) -> None:
    """Appends messages of several lines, so long that a torn one would show."""
    queue = TextQueue(path)
    for number in range(int(count)):
        text = f"{name}-{number} " + "x" * (number % 3000) + "\nend"
        queue.append(text, {"by": reserve(10), "mutex": reserve(6)})


def change(path: str, part: str, parts: str, count: str) -> None:
    """Random changes of its own part of the messages, and appends; returns the expected result."""
    queue, journal = TextQueue(path), Journal(f"{path}.{part}.journal")
    chance = random.Random(part)
    mine = {
        entry.text: entry
        for entry in queue
        if entry.text.startswith("message-") and int(entry.text[8:]) % int(parts) == int(part)
    }
    state = dict.fromkeys(mine, "queued")
    by = dict.fromkeys(mine, "-")
    for number in range(int(count)):
        text = chance.choice(list(mine))
        what = chance.choice(["done", "fail", "set", "set", "append"])
        if what == "append":
            added = queue.append(f"part{part}-{number}", {"by": "-" + reserve(9)})
            mine[added.text], state[added.text], by[added.text] = added, "queued", "-"
        elif what == "set":
            by[text] = str(number)
            queue.set_variable(mine[text], "by", by[text])
        else:
            try:
                queue.done(mine[text]) if what == "done" else queue.fail(mine[text])
                assert state[text] == "queued"
                state[text] = "processed" if what == "done" else "error"
            except AlreadyMarked:
                assert state[text] != "queued"
    for text in mine:
        journal(f"{state[text]} {by[text]}", text)


def change_beside_editor(path: str, part: str, parts: str, count: str) -> None:
    """Random marks and variables of its own part, claims, appends; returns what it was told.

    Where the file was rewritten, the message is looked for again by its text.
    """
    queue, journal = TextQueue(path), Journal(path + ".journal")
    tell_losses(journal)
    chance = random.Random(part)
    mine = [f"message-{number}" for number in range(2000) if number % int(parts) == int(part)]
    known: dict[str, Entry] = {}
    counted = os.open(path + ".changes", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in range(int(count)):
        os.write(counted, b".")
        text = chance.choice(mine)
        try:
            if chance.random() < 0.1:
                claim = queue.claim()
                if claim is not None:
                    text = claim.text
                    finish(claim, journal, chance)
                continue
            if chance.random() < 0.1:
                text = f"part{part}-{number}"
                journal("appending", text)
                queue.append(text, {"by": reserve(10), "mutex": reserve(6), "error": reserve(8)})
                continue
            if text not in known:
                known = {entry.text: entry for entry in queue.entries(*State)}
            if text not in known:
                continue  # an editor has emptied the file, and is about to write it
            what = chance.choice(["done", "fail", "set", "set", "set"])
            if what == "set":
                queue.set_variable(known[text], "by", str(number))
            else:
                queue.done(known[text]) if what == "done" else queue.fail(known[text])
        except (Rewritten, AlreadyMarked) as error:
            journal(type(error).__name__, text)
            if isinstance(error, Rewritten):
                known.clear()
        except FormatError:
            known.clear()  # an editor is writing into the file


def tell_losses(journal: Journal) -> None:
    """Put every message that is reported to be gone into the journal."""

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        assert isinstance(message, AppendLost)
        for _, start in message.appends:
            journal("gone", start)

    warnings.simplefilter("always", AppendLost)
    warnings.showwarning = show


def edit_in_place(path: str, seconds: str) -> None:
    """Saves an older copy into the same file, time and again; what it changes is one letter."""
    ends, seen, stop = time.monotonic() + float(seconds), 0, Path(path + ".stop")
    while time.monotonic() < ends and not stop.exists():
        content = Path(path).read_bytes()
        time.sleep(0.01)
        first = b"# edited\n" if content.startswith(b"# Edited\n") else b"# Edited\n"
        Path(path).write_bytes(first + content[len(first) :])
        seen = rest(path, seen)


def edit(path: str, seconds: str) -> None:
    """Rewrites the whole file, as an editor without locks does: a comment comes or goes."""
    ends, seen, stop = time.monotonic() + float(seconds), 0, Path(path + ".stop")
    while time.monotonic() < ends and not stop.exists():
        content = Path(path).read_bytes()
        comment = b"# edited\n"
        new = content[len(comment) :] if content.startswith(comment) else comment + content
        time.sleep(0.005)  # what changes now is lost
        beside = Path(path + ".editor")
        beside.write_bytes(new)
        beside.replace(path)
        seen = rest(path, seen)


def rest(path: str, seen: int) -> int:
    """A moment, and until others have made a few more changes, where these are counted.

    On a busy machine they would else do nothing but find out that the file is another.
    """
    time.sleep(0.01)
    counted, stop = Path(path + ".changes"), Path(path + ".stop")
    while counted.exists() and not stop.exists():
        now = counted.stat().st_size
        if now >= seen + 20:
            return now
        time.sleep(0.001)
    return 0


def compact(path: str, seconds: str) -> None:
    queue, ends = TextQueue(path), time.monotonic() + float(seconds)
    while time.monotonic() < ends:
        queue.compact()
        time.sleep(0.005)


def read(path: str, count: str) -> None:
    """Reads beside writers until it has seen this many, each of them whole."""
    queue, seen = TextQueue(path), 0
    while seen < int(count):
        entries = list(queue.entries(*State, hold_back=True))
        assert all(entry.text.endswith("end") for entry in entries)
        assert all(len(entry.variables) == 2 for entry in entries)
        seen = len(list(queue.entries(*State)))


ROLES: dict[str, Callable[..., None]] = {
    "work": work,
    "write": write,
    "change": change,
    "change_beside_editor": change_beside_editor,
    "edit": edit,
    "edit_in_place": edit_in_place,
    "compact": compact,
    "read": read,
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
