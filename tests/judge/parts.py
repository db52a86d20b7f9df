"""A history that is judged part by part, so that memory has to hold one part of it alone.

What a rule over messages looks at is in one part: a message by its key, with all that commands, an
ID or a token connect it with. Operations on queues are in all parts. So each part is a history by
itself, but for what `whole` has. Two passes over the lines make the parts: one finds what is
connected, one writes each part into a temporary file.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TextIO

from tests.judge.facts import Facts
from tests.judge.histories import INFO, OK, Operation, operations
from tests.judge.links import Links, node
from tests.judge.rules import NAMES, Fault, Judge
from tests.judge.whole import SPANNING, Spanning, Whole

PART_BYTES: Final = 128 << 20
"""Of a history, in one part: judging it takes some five times as much memory."""

PARTS_MAX: Final = 500
"""Files that are open at once."""

_ORDER_DIGITS: Final = 20
"""Of a time in ns, and of the number of an operation: as texts they have the order of numbers."""

_ON_TOKENS: Final = ("ack", "extend", "nack")


@dataclass
class Verdict:
    """What was judged, and what is wrong with it.

    Attributes:
        counts: Of operations, by function and outcome.
        faults: Rule by rule.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    deliveries_count: int = 0
    faults: list[Fault] = field(default_factory=list)

    @property
    def operations_count(self) -> int:
        return self.counts.total()


def judge(files: Sequence[Path], part_bytes: int = PART_BYTES) -> Verdict:
    """Judge the history that these files are, in parts of about this many bytes.

    A temporary folder takes as many bytes as the history meanwhile. Raises Malformed.
    """
    verdict, whole, spanning = Verdict(), Whole(), Spanning()
    parts_count = 1 + sum(file.stat().st_size for file in files) // part_bytes
    with TemporaryDirectory(prefix="judge-") as name:
        parts = [Path(name) / str(number) for number in range(min(parts_count, PARTS_MAX))]
        _divide(files, parts, verdict, whole)
        for part in parts:
            verdict.faults += _judge_part(part, whole, spanning)
            part.unlink()
    for rule, found in SPANNING.items():
        verdict.faults += [Fault(rule, text) for text in found(spanning)]
    verdict.faults.sort(key=lambda one: (NAMES.index(one.rule), one.text))
    return verdict


def _judge_part(part: Path, whole: Whole, spanning: Spanning) -> list[Fault]:
    """What is known of the part is forgotten with the end of this."""
    one = Judge(Facts(_read(part)), whole)
    one.add_to(spanning)
    return one.faults()


def _divide(files: Sequence[Path], parts: Sequence[Path], verdict: Verdict, whole: Whole) -> None:
    """Write the parts, and what only the whole history says."""
    links = Links()
    for one in operations(files):
        _link(one, links)
        verdict.counts[one.f, one.outcome] += 1
        if came := _came(one):
            verdict.deliveries_count += len(came)
            whole.delivering.add(one.value["queue"])
    divider = _Divider(links, len(parts))
    with ExitStack() as stack:
        outs = [stack.enter_context(part.open("w", encoding="ascii")) for part in parts]
        for one in operations(files):
            if one.f == "drain" and _is_any_unknown(one, links):
                whole.unknown_dead.add(one.value["queue"])
            for numbers, piece in divider.pieces(one):
                _write(piece, (outs[number] for number in numbers))


# --- What is connected ------------------------------------------------------


def _link(one: Operation, links: Links) -> None:
    """Note what an operation connects. Keys are joined to nothing but by commands."""
    if one.f == "publish" and one.outcome == OK:
        for message, message_id in zip(_messages(one), one.result.get("ids", ()), strict=False):
            links.join(node("id", message_id), node("key", message["key"]))
    for message in _came(one):
        key = node("key", message["key"])
        links.join(node("id", message["id"]), key)
        links.join(node("token", message["token"]), key)
    if one.f == "execute":
        first, *others = _commanded(one) or [0]
        for other in others:
            links.join(other, first)


def _messages(one: Operation) -> Sequence[Mapping[str, Any]]:
    messages: Sequence[Mapping[str, Any]] = one.value["messages"]
    return messages


def _came(one: Operation) -> Sequence[Mapping[str, Any]]:
    """The messages that a claim got."""
    is_known = one.f == "claim" and one.outcome == OK
    came: Sequence[Mapping[str, Any]] = one.result.get("messages", ()) if is_known else ()
    return came


def _commanded(one: Operation) -> list[int]:
    """The nodes of all commands."""
    return [
        node("key", command["key"]) if command["do"] == "push" else node("token", command["token"])
        for command in one.value["commands"]
    ]


def _dead(one: Operation) -> Sequence[Mapping[str, Any]]:
    dead: Sequence[Mapping[str, Any]] = one.result.get("dead", ()) if one.outcome == OK else ()
    return dead


def _is_any_unknown(one: Operation, links: Links) -> bool:
    """Whether one of the dead letters has an ID that nothing else has."""
    return any(node("id", dead["id"]) not in links for dead in _dead(one))


# --- Parts ------------------------------------------------------------------


class _Divider:
    """Cuts operations into what each part has of them."""

    def __init__(self, links: Links, parts_count: int) -> None:
        self._links = links
        self._parts_count = parts_count

    def pieces(self, one: Operation) -> Iterator[tuple[Iterable[int], Operation]]:
        """What of an operation goes to which parts; nothing, where no rule looks at it."""
        if one.f == "publish":
            nodes = [node("key", message["key"]) for message in _messages(one)]
            yield from self._cut(one, nodes, _part_of_publish)
        elif one.f in _ON_TOKENS:
            nodes = [node("token", token) for token in one.value["tokens"]]
            yield from self._cut(one, nodes, _part_of_answers)
        elif one.f == "claim" and one.outcome != INFO:
            nodes = [node("key", message["key"]) for message in _came(one)]
            yield from self._cut(one, nodes, _part_of_claim)
        elif one.f == "execute":
            for first in _commanded(one)[:1]:
                yield (self._part(first),), one
        elif one.f == "drain":
            places = self._by_part([node("id", dead["id"]) for dead in _dead(one)])
            for number in range(self._parts_count):
                yield (number,), _part_of_drain(one, places.get(number, ()))
        else:
            yield range(self._parts_count), one

    def _cut(
        self,
        one: Operation,
        nodes: Sequence[int],
        part_of: Callable[[Operation, Sequence[int]], Operation],
    ) -> Iterator[tuple[Iterable[int], Operation]]:
        for number, places in self._by_part(nodes).items():
            yield (number,), part_of(one, places) if len(places) < len(nodes) else one

    def _by_part(self, nodes: Iterable[int]) -> Mapping[int, Sequence[int]]:
        """By the number of the part, the places of these nodes that are in it."""
        places: dict[int, list[int]] = defaultdict(list)
        for place, one in enumerate(nodes):
            places[self._part(one)].append(place)
        return places

    def _part(self, one: int) -> int:
        return self._links.root(one) % self._parts_count


def _part_of_publish(one: Operation, places: Sequence[int]) -> Operation:
    value = {**one.value, "messages": _picked(_messages(one), places)}
    return replace(one, value=value, result=_picked_of(one.result, ("ids",), places))


def _part_of_claim(one: Operation, places: Sequence[int]) -> Operation:
    """With room as the whole claim had."""
    came = _came(one)
    most = one.value.get("max", 1) - (len(came) - len(places))
    result = {**one.result, "messages": _picked(came, places)}
    return replace(one, value={**one.value, "max": most}, result=result)


def _part_of_answers(one: Operation, places: Sequence[int]) -> Operation:
    value = {**one.value, "tokens": _picked(one.value["tokens"], places)}
    result = _picked_of(one.result, ("results", "deadlines_ms"), places)
    return replace(one, value=value, result=result)


def _part_of_drain(one: Operation, places: Sequence[int]) -> Operation:
    return replace(one, result={**one.result, "dead": _picked(_dead(one), places)})


def _picked_of(
    result: Mapping[str, Any], names: Iterable[str], places: Sequence[int]
) -> dict[str, Any]:
    picked = {name: _picked(result[name], places) for name in names if result.get(name)}
    return {**result, **picked}


def _picked(values: Sequence[Any], places: Sequence[int]) -> list[Any]:
    return [values[place] for place in places]


def _write(one: Operation, outs: Iterable[TextIO]) -> None:
    """A line: when it began and its number, by which lines are sorted, and the rest as JSON."""
    order = f"{one.began:0{_ORDER_DIGITS}}{one.number:0{_ORDER_DIGITS}}"
    rest = json.dumps((one.process, one.f, one.value, one.ended, one.outcome, one.result))
    for out in outs:
        out.write(f"{order}{rest}\n")


def _read(part: Path) -> Iterator[Operation]:
    """The operations of a part, in the order of their beginnings."""
    with part.open("rb") as file:
        lines = sorted(file, reverse=True)
    while lines:
        line = lines.pop()
        process, f, value, ended, outcome, result = json.loads(line[2 * _ORDER_DIGITS :])
        began = int(line[:_ORDER_DIGITS])
        yield Operation(process, f, began, value, ended, outcome, result)
