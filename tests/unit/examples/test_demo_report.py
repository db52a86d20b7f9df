"""What the demo prints: the counts of the judge, and below them what each of them means."""

from __future__ import annotations

import io

from rich.console import Console

from examples.demo.judge import Delivery, Outcome, Verdict, judge
from examples.demo.queues import MAX_ATTEMPTS, DemoQueue
from examples.demo.report import CAPTION, show

QUEUE = DemoQueue("all", filter="true", matches=lambda _: True)
POISON = b'{"id": 1, "amount_cents": 5, "currency": null}'
AGAIN, MISSING = b'{"id": 2}', b'{"id": 3}'

WIDTH = 80


def printed(verdict: Verdict) -> list[str]:
    file = io.StringIO()
    show(Console(file=file, width=WIDTH), verdict, 1.0)
    return file.getvalue().splitlines()


def verdict_of(*kinds: str) -> Verdict:
    """The judge's, of messages that ended in these ways."""
    attempts = range(1, MAX_ATTEMPTS + 1)
    histories = {
        "failed": (POISON, [Delivery("all", POISON, n, Outcome.FAILED) for n in attempts]),
        "redelivered": (
            AGAIN,
            [Delivery("all", AGAIN, 1, Outcome.FAILED), Delivery("all", AGAIN, 2, Outcome.ACKED)],
        ),
        "lost": (MISSING, []),
    }
    lines = [histories[kind][0] for kind in kinds]
    return judge(lines, [QUEUE], [note for kind in kinds for note in histories[kind][1]])


def counts(lines: list[str]) -> dict[str, int]:
    """The last row of the table, by the heads of its columns."""
    rows = [line for line in lines if "│" in line or "┃" in line]
    heads = rows[0].strip("┃ ").split("┃")
    cells = rows[-1].strip("│ ").split("│")
    return {head.strip(): int(cell) for head, cell in zip(heads[1:], cells[1:], strict=True)}


def test_the_caption_below_the_table_explains_each_count_that_looks_like_a_fault() -> None:
    lines = printed(verdict_of("failed", "redelivered", "lost"))

    # The whole caption stands below the table, and no line of it is folded
    start = lines.index(CAPTION.splitlines()[0])
    assert lines[start : start + len(CAPTION.splitlines())] == CAPTION.splitlines()
    assert start > max(place for place, line in enumerate(lines) if "│" in line)
    # Each line of it explains a column, and all columns but those that need no word have one
    explained = [line.split()[0] for line in CAPTION.splitlines()]
    assert explained == [name for name in counts(lines) if name not in ("routed", "acked")]


def test_the_caption_is_true_of_what_the_judge_counts() -> None:
    # A message that was refused at every attempt is `failed`, and no fault
    failed = verdict_of("failed")
    assert counts(printed(failed))["failed"] == 1
    assert (counts(printed(failed))["lost"], failed.faults) == (0, [])
    # One that came again after a failure is `redelivered`, and no fault
    redelivered = verdict_of("redelivered")
    assert counts(printed(redelivered))["redelivered"] == 1
    assert (counts(printed(redelivered))["lost"], redelivered.faults) == (0, [])
    # One that was neither acked nor failed is `lost`, and the only one that is a fault
    lost = verdict_of("lost")
    assert counts(printed(lost))["lost"] == 1
    assert any(line.startswith("wrong: ") for line in printed(lost))
