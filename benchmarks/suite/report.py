"""The page: its table between two marks, and the picture beside it; nothing else of it changes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.suite import picture
from benchmarks.suite.event_queues import BACKENDS
from benchmarks.suite.results import OURS, Results

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
TITLES = {
    "a": "(a) 1 KiB, publish then consume and ack",
    "ar": "(a) the same with random bytes",
    "b": "(b) 100 B, publish then consume and ack",
    "c": "(c) 1 KiB, both at once",
    "d": "(d) 64 clients, single messages",
    "e500": "(e) publish to delivered, 500/s",
    "e2000": "(e) publish to delivered, 2,000/s",
    "f": "(f) each message to 10 queues",
    "g": "(g), (j) backlog, and starts with it",
    "h": "(h) routing by number of queues",
    "i1024": "(i) written to the store, 1 KiB",
    "i1024r": "(i) written to the store, 1 KiB of random bytes",
    "i100": "(i) written to the store, 100 B",
    "icost": "(i) requests to the store, by rate and commit interval",
    "k": "(k) one publish, by mode of event queues",
    "limits": "limits: gRPC and SlateDB bare",
}


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _compared(results: Results) -> list[str]:
    systems = list(results.settings)
    lines = [
        f"| workload | what | {' | '.join(systems)} |",
        f"|---|---|{'---|' * len(systems)}",
    ]
    for name, title in TITLES.items():
        if name[0] not in "abcdef":
            continue
        for what, medians in results.medians(name).items():
            cells = []
            for system in systems:
                ratio = results.ratio(what, medians, system)
                number = _number(medians[system]) if system in medians else "–"
                cells.append(f"{number} (×{ratio:.2f})" if ratio else number)
            lines.append(f"| {title} | {what} | {' | '.join(cells)} |")
    return lines if len(lines) > 2 else []


def _own(results: Results) -> list[str]:
    """A table for each of our own: a row for each thing, a column for each place on its axis."""
    lines: list[str] = []
    for name, title in TITLES.items():
        medians = {what: by[OURS] for what, by in results.medians(name).items() if OURS in by}
        if name[0] in "abcdef" or not medians:
            continue
        points = sorted({int(what.rsplit("@", 1)[1]) for what in medians if "@" in what})
        lines += ["", f"**{title}**", ""]
        if name == "k":
            lines += _by_mode(medians, results.chosen[name][OURS])
            continue
        if not points:
            lines += ["| what | |", "|---|---|"]
            lines += [f"| {what} | {_number(value)} |" for what, value in medians.items()]
            continue
        rows = dict.fromkeys(what.rsplit(" @", 1)[0] for what in medians)
        lines += [f"| what | {' | '.join(f'{point:,}' for point in points)} |"]
        lines += [f"|---|{'---|' * len(points)}"]
        for row in rows:
            cells = [medians.get(f"{row} @{point}") for point in points]
            items = ["–" if cell is None else _number(cell) for cell in cells]
            lines.append(f"| {row} | {' | '.join(items)} |")
    return lines


def _by_mode(medians: Mapping[str, float], settings: Mapping[str, Any]) -> list[str]:
    """(k): a table for each store, with a row for each mode on each backend."""
    cells: dict[str, dict[str, dict[tuple[str, str], float]]] = {}
    for name, value in medians.items():
        row, callers, what = name.rsplit(", ", 2)
        store, _, mode = row.partition(", ")
        cells.setdefault(store, {}).setdefault(mode, {})[callers, what] = value
    lines = []
    for store, rows in cells.items():
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        columns.sort(key=lambda column: int(column[0].split()[0]))
        lines += [f"| {store} | {' | '.join(', '.join(column) for column in columns)} |"]
        lines += [f"|---|{'---|' * len(columns)}"]
        for mode, found in rows.items():
            items = [_number(found[one]) if one in found else "–" for one in columns]
            lines.append(f"| {mode} | {' | '.join(items)} |")
        lines.append("")
    lines += [f"- {what}: {items}" for what, items in settings.items() if what in BACKENDS]
    lines += [f"- left out: {what}: {why}" for what, why in settings.get("left out", {}).items()]
    return lines


def _section(results: Results, drawn: str) -> str:
    lines = [f"Measured with `{results.command}`, on {results.machine}.", ""]
    lines += [f"- {system}: {text}" for system, text in results.settings.items()]
    lines += [f"- {system}: left out: {why}" for system, why in results.left_out.items()]
    lines += [f"- FAILED: {failure}" for failure in results.failures]
    compared = _compared(results)
    if compared:
        lines += ["", "×: how much better SlateMQ is; under 1 it is worse.", "", *compared]
    lines += ["", f"![The same as a picture]({drawn})", *_own(results)]
    return "\n".join(lines)


def write(results: Results, place: Path) -> None:
    """Writes `place`/results.json, `place`/results.svg, and the table into `place`.md."""
    place.mkdir(parents=True, exist_ok=True)
    results.write(place / "results.json")
    picture.draw(results, place / "results.svg")
    page = place.with_suffix(".md")
    text = page.read_text(encoding="utf-8") if page.exists() else f"{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    result = _section(results, f"{place.name}/results.svg")
    page.write_text(f"{before}{BEGIN}\n\n{result}\n\n{END}{after}", encoding="utf-8")
