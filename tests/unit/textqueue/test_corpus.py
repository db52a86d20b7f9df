"""The corpus for readers in any language, held to ours and to one that shares nothing with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slatemq.textqueue import (
    AlreadyMarked,
    DoesNotFit,
    FormatError,
    NoSuchEntry,
    NoSuchVariable,
    NotAMessage,
    TextQueue,
    TextQueueError,
    parse,
)
from tests.conformance.naive_reader import expected

CORPUS = Path(__file__).resolve().parents[2] / "conformance" / "textqueue"
READ = sorted((CORPUS / "read").glob("*.tq"))
CHANGE = sorted((CORPUS / "change").glob("*.json"))

RULES = {
    "a continuation before any entry": "nothing above",
    "a variable before any entry": "nothing above",
    "a continuation after a variable": "continuation after variable",
    "unknown control character": "unknown control",
    "not UTF-8": "not UTF-8",
}

REFUSALS: dict[str, type[TextQueueError]] = {
    "already marked": AlreadyMarked,
    "not a message": NotAMessage,
    "no entry there": NoSuchEntry,
    "no such variable": NoSuchVariable,
    "does not fit": DoesNotFit,
}


def described(content: bytes, strict: bool) -> dict[str, Any]:
    try:
        document = parse(content, strict=strict)
    except FormatError as error:
        [rule] = [rule for why, rule in RULES.items() if error.why.startswith(why)]
        return {"error": {"line": error.line, "column": error.column, "rule": rule}}
    assert document.dump() == content
    return {
        "entries": [
            {
                "line": entry.line,
                "offset": entry.offset,
                "control": entry.control,
                "state": entry.state.value,
                "text": entry.text,
                "variables": [
                    {
                        "index": one.index,
                        "name": one.name,
                        "value": one.value,
                        "offset": one.offset,
                        "reserved_bytes": one.width,
                    }
                    for one in entry.variables
                ],
            }
            for entry in document.entries
        ]
    }


@pytest.mark.parametrize("path", READ, ids=lambda path: path.stem)
def test_a_file_is_read_as_the_corpus_says(path: Path) -> None:
    content = path.read_bytes()
    wanted = json.loads(path.with_suffix(".json").read_text())
    assert expected(content) == wanted
    if wanted["strict"] == "as lenient":
        wanted["strict"] = wanted["lenient"]
    assert {"lenient": described(content, False), "strict": described(content, True)} == wanted


@pytest.mark.parametrize("path", CHANGE, ids=lambda path: path.stem)
def test_a_file_is_changed_as_the_corpus_says(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "jobs.tq"
    before = path.with_suffix(".before.tq").read_bytes()
    file.write_bytes(before)
    what = json.loads(path.read_text())

    if "refused" in what:
        with pytest.raises(REFUSALS[what["refused"]]):
            change(TextQueue(file), what)
        assert file.read_bytes() == before
    else:
        change(TextQueue(file), what)
        assert file.read_bytes() == path.with_suffix(".after.tq").read_bytes()


def change(queue: TextQueue, what: dict[str, Any]) -> None:
    match what["do"]:
        case "append":
            queue.append(what["text"], what["variables"])
        case "claim":
            assert queue.claim() is not None
        case "done":
            queue.done(queue.entry(what["offset"]))
        case "fail":
            queue.fail(queue.entry(what["offset"]), what["code"])
        case "set":
            key = what["name"] if "name" in what else what["index"]
            queue.set_variable(queue.entry(what["offset"]), key, what["value"])


def test_the_corpus_has_every_rule_and_every_kind_of_change() -> None:
    wanted = [json.loads(path.with_suffix(".json").read_text()) for path in READ]
    rules = {
        one[mode]["error"]["rule"]
        for one in wanted
        for mode in ("lenient", "strict")
        if "error" in one[mode]
    }
    assert rules == set(RULES.values())
    changes = [json.loads(path.read_text()) for path in CHANGE]
    assert {one["do"] for one in changes} == {"append", "claim", "done", "fail", "set"}
    assert {one.get("refused") for one in changes} == {None, *REFUSALS}
