"""Arguments that a call can do nothing with are named, with what is wanted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slatemq.textqueue import TextQueue, render, reserve

Call = Callable[[Any], object]


def wrong(value: object) -> Any:
    """What types would not let pass."""
    return value


CALLS: list[tuple[str, type[Exception], Call]] = [
    ("width must be 0 bytes or more, not -1", ValueError, lambda _: reserve(-1)),
    ("width must be a number of bytes, not str: '4'", TypeError, lambda _: reserve(wrong("4"))),
    ("width must be 3 bytes or more for 'é!', not 2", ValueError, lambda _: reserve(2, "é!")),
    ("value must be str, not int: 4", TypeError, lambda _: reserve(2, wrong(4))),
    ("text must be str, not int: 5", TypeError, lambda queue: queue.append(5)),
    ("text must be str, not bytes: b'a'", TypeError, lambda queue: queue.append(b"a")),
    ("text must be str, not int: 5", TypeError, lambda queue: queue.append_all(["a", 5])),
    ("texts must be several texts, not int: 5", TypeError, lambda queue: queue.append_all(5)),
    ("variables must be several texts, not int", TypeError, lambda queue: queue.append("a", 5)),
    (
        r"variables\['n'\] must be str, not int",
        TypeError,
        lambda queue: queue.append("a", {"n": 1}),
    ),
    ("a name in variables must be str", TypeError, lambda queue: queue.append("a", {1: "n"})),
    ("a variable must be str, not int: 1", TypeError, lambda queue: queue.append("a", [1])),
    ("a state must be one of queued, ", ValueError, lambda _: render("a", (), wrong("new"))),
    ("a state must be one of queued, ", ValueError, lambda queue: queue.entries("new")),
    ("entry must be Entry, not int: 0", TypeError, lambda queue: queue.done(0)),
    ("entry must be Entry, not int: 0", TypeError, lambda queue: queue.set_variable(0, "n", "")),
    ("code must be str, not int: 5", TypeError, lambda queue: queue.fail(queue.entry(0), 5)),
    ("a value must be str", TypeError, lambda queue: queue.set_variable(queue.entry(0), "n", 5)),
    ("offset must be int, not str: '0'", TypeError, lambda queue: queue.entry("0")),
    ("token must be str, not int: 0", TypeError, lambda queue: queue.claimed(0)),
    ("lease must be a timedelta, such as", TypeError, lambda queue: queue.claim(60)),
]


@pytest.mark.parametrize(("text", "kind", "call"), CALLS, ids=[text for text, _, _ in CALLS])
def test_wrong_arguments_are_named(
    tmp_path: Path, text: str, kind: type[Exception], call: Call
) -> None:
    queue = TextQueue(tmp_path / "jobs.tq")
    queue.append("one", {"n": "1"})

    with pytest.raises(kind, match=text):
        call(queue)

    assert (tmp_path / "jobs.tq").read_text() == "-one\n\\n=1\n"


def test_a_path_may_be_bytes(tmp_path: Path) -> None:
    queue = TextQueue(wrong(bytes(tmp_path / "jobs.tq")))

    queue.append("one")

    assert queue.claim() is not None


def test_a_variable_has_a_line(tmp_path: Path) -> None:
    path = tmp_path / "jobs.tq"
    path.write_text("# note\n-one\n two\n\n\\a=1\n\\b=2\n")
    [entry] = TextQueue(path)

    assert [entry.line_of(one) for one in entry.variables] == [5, 6]
    assert TextQueue(path).entry(entry.offset).line_of(entry.variables[0]) == 0
