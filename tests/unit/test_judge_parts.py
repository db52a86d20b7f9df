"""A history that is judged in parts: as it is in one, whatever is wrong with it."""

from __future__ import annotations

import copy
import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.forms import seeds
from tests.judge.links import Links, node
from tests.judge.parts import Verdict, judge
from tests.judge.rules import NAMES
from tests.judge.whole import Late, Taken
from tests.long_histories import long_history, write
from tests.unit.test_judge import FAULTLESS, FAULTS, Story

PARTS = 7
KIB = 1 << 10

Call = list[dict[str, Any]]
"""The two lines of an operation."""


def judged_in_parts(file: Path, parts_count: int = PARTS) -> Verdict:
    return judge([file], file.stat().st_size // parts_count)


@pytest.mark.parametrize("happened", [*FAULTLESS, *(fault for fault, _ in FAULTS)])
def test_what_happened_is_judged_in_parts_as_in_one(
    happened: Callable[[Story], None], tmp_path: Path
) -> None:
    story = Story()
    happened(story)
    if not any(line["f"] == "drain" for line in story.lines):
        story.drained()
    file = story.write(tmp_path)

    assert judged_in_parts(file) == judge([file])


# --- Whatever is wrong ------------------------------------------------------


def outcome_unknown(calls: list[Call], at: int, luck: random.Random) -> None:
    calls[at][1] = {**calls[at][1], "type": "info", "value": {}}


def refused(calls: list[Call], at: int, luck: random.Random) -> None:
    calls[at][1] = {**calls[at][1], "type": "fail", "value": {}}


def left_out(calls: list[Call], at: int, luck: random.Random) -> None:
    del calls[at]


def again(calls: list[Call], at: int, luck: random.Random) -> None:
    """The same once more, as of another process, which ends it a minute later or never."""
    if len(calls[at]) == 1:
        return
    invoke, end = copy.deepcopy(calls[at])
    invoke["process"] = end["process"] = f"other-{at}"
    invoke["time"] += luck.choice((1, 10**9))
    end["time"] += 60 * 10**9
    calls.insert(at + 1, [invoke, end][: luck.choice((1, 2))])


def late(calls: list[Call], at: int, luck: random.Random) -> None:
    """A claim that came minutes later than it did."""
    if calls[at][0]["f"] not in ("claim", "ack", "nack") or len(calls[at]) == 1:
        return
    invoke, end = calls.pop(at)
    invoke["process"] = end["process"] = f"late-{at}"
    for place, line in enumerate((invoke, end)):
        line["time"] = calls[-1][-1]["time"] + 100 * 10**9 + place
    for message in end["value"].get("messages", ()):
        message["deadline_ms"] += 100_000 + end["time"] // 10**6
    calls.append([invoke, end])


def another_value(calls: list[Call], at: int, luck: random.Random) -> None:
    """A message that came with a field of another one, or of none."""
    messages = calls[at][-1]["value"].get("messages") or calls[at][0]["value"].get("messages")
    others = luck.choice(calls)[-1]["value"].get("messages")
    if messages:
        name = luck.choice(("key", "id", "token", "attempt", "headers", "digest", "deadline_ms"))
        message = luck.choice(messages)
        if name in message and others:
            message[name] = luck.choice(others)[name]
        elif "attempt" in message:
            message["attempt"] += luck.choice((-1, 1, 2))
        else:
            message |= luck.choice(({"delay_ms": 5000}, {"retention_ms": 1}, {"headers": {}}))


def of_the_queue(calls: list[Call], at: int, luck: random.Random) -> None:
    """Something that is done to a queue."""
    f = luck.choice(("purge", "pause", "resume", "move", "redrive", "update-queue", "trouble"))
    queue = luck.choice(("all", "even", "third", "orders", "shipped", "fragile"))
    asked = {"queue": queue, "filter": 'headers.class == "1"'}
    invoke = {"time": calls[at][0]["time"] + 1, "process": f"queue-{at}", "type": "invoke"}
    end = invoke | {"time": invoke["time"] + 10, "type": luck.choice(("ok", "info"))}
    said = {"moved_count": luck.randrange(3)}
    calls.insert(at, [invoke | {"f": f, "value": asked}, end | {"f": f, "value": said}])


def dead_at_the_end(calls: list[Call], at: int, luck: random.Random) -> None:
    """A dead letter more, of a message that there is, or of none."""
    drains = [one for one in calls if one[0]["f"] == "drain" and "dead" in one[-1]["value"]]
    for _, end in drains[:1]:
        reason = luck.choice(("attempts exhausted", "payload gone"))
        end["value"]["dead"] += [{"id": luck.randrange(500), "attempt": 2, "reason": reason}]


SPOILERS = (
    *(outcome_unknown, refused, left_out, again, late, another_value, another_value),
    *(of_the_queue, dead_at_the_end),
)


def spoiled(luck: random.Random, messages_count: int) -> list[dict[str, Any]]:
    """The lines of a history to which a number of things happened."""
    lines = list(long_history(messages_count))
    calls: list[Call] = [list(pair) for pair in zip(lines[::2], lines[1::2], strict=True)]
    for _ in range(luck.randrange(1, 25)):
        luck.choice(SPOILERS)(calls, luck.randrange(6, len(calls)), luck)
    return [line for call in calls for line in call]


@pytest.mark.parametrize("seed", seeds(60, 12))
def test_a_history_with_any_faults_is_judged_in_parts_as_in_one(seed: int, tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    lines = spoiled(random.Random(seed), 300)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    assert judged_in_parts(file) == judge([file])


def test_the_spoiled_histories_have_faults_of_nearly_all_rules(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    found = set()
    for seed in range(40):
        lines = spoiled(random.Random(seed), 100)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        found |= {fault.rule for fault in judge([file]).faults}

    assert len(found) > len(NAMES) - 4, set(NAMES) - found


def test_what_is_passed_over_is_found_as_by_holding_each_against_each() -> None:
    luck = random.Random(5)
    for _ in range(50):
        taken, all_taken = Taken(), []
        for _ in range(luck.randrange(1, 60)):
            place, ended, sent = (luck.randrange(1, 30) for _ in range(3))
            taken.add(place, ended, sent)
            all_taken.append((place, ended, sent))
        late = [
            Late(luck.randrange(1, 30), luck.randrange(1, 30), luck.randrange(1, 30), f"{number}")
            for number in range(30)
        ]
        expected = {
            one
            for one in late
            if any(
                place > one.place and ended < one.began and sent > one.limit
                for place, ended, sent in all_taken
            )
        }

        assert set(taken.before(late)) == expected


# --- In bounded memory ------------------------------------------------------


def peak_kib(file: Path) -> int:
    tracemalloc.start()
    try:
        judge([file], 256 * KIB)
        return tracemalloc.get_traced_memory()[1] // KIB
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_length_of_a_history(tmp_path: Path) -> None:
    peaks = []
    for count in (100, 500, 5000):
        file = tmp_path / f"{count}.jsonl"
        write(file, count)
        peaks.append(peak_kib(file))

    _, short, long = peaks  # The first one compiles the filters.
    assert long < 2 * short, peaks


def test_a_long_history_has_no_fault_in_parts(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    write(file, 2000)

    verdict = judged_in_parts(file)

    assert verdict.faults == []
    assert verdict.deliveries_count > 3000
    assert verdict.operations_count == len(file.read_text().splitlines()) // 2


# --- Links ------------------------------------------------------------------


def test_what_is_joined_by_any_way_has_one_root() -> None:
    luck = random.Random(3)
    links, groups = Links(), {number: {number} for number in range(1, 6000)}
    for _ in range(4000):
        one, other = luck.randrange(1, 6000), luck.randrange(1, 6000)
        links.join(one, other)
        group = groups[one] | groups[other]
        for each in group:
            groups[each] = group

    assert all(links.root(one) == links.root(min(groups[one])) for one in groups)
    assert len({links.root(one) for one in groups}) == len({id(each) for each in groups.values()})


def test_a_node_is_known_once_it_was_joined() -> None:
    links = Links()
    links.join(node("id", 7), node("key", "m"))

    assert node("id", 7) in links
    assert node("id", 8) not in links
    assert links.root(node("id", 7)) == node("key", "m")
