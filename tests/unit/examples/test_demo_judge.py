"""The demo's judge must find what it is there to find."""

import json
from pathlib import Path

import pytest

from examples.demo.judge import Delivery, Outcome, Verdict, drop_one, judge
from examples.demo.queues import MAX_ATTEMPTS, QUEUES, DemoQueue, headers_of
from examples.make_events import events
from libs.filters.expressions import Facts, Filter, context

EVENTS_FILE = Path(__file__).parents[3] / "examples" / "events.jsonl"

ALL = DemoQueue("all", filter="true", matches=lambda _: True)
EU = DemoQueue("eu", filter="", matches=lambda event: event["region"] == "eu")


def line(number: int, region: str = "eu", **more: object) -> bytes:
    return json.dumps({"id": number, "region": region} | more).encode()


def acked(payload: bytes, attempt: int = 1, queue: str = "all") -> Delivery:
    return Delivery(queue, payload, attempt, Outcome.ACKED)


def failed(payload: bytes, attempt: int = 1, queue: str = "all") -> Delivery:
    return Delivery(queue, payload, attempt, Outcome.FAILED)


def faults_of(lines: list[bytes], notes: list[Delivery], queue: DemoQueue = ALL) -> list[str]:
    return judge(lines, [queue], notes).faults


def test_each_line_acked_once_is_a_perfect_run() -> None:
    lines = [line(1), line(2, "us")]

    verdict = judge(lines, [ALL, EU], [*map(acked, lines), acked(lines[0], queue="eu")])

    assert (verdict.published, verdict.lost, verdict.faults) == (2, 0, [])
    assert [(q.routed, q.acked, q.redelivered) for q in verdict.queues] == [(2, 2, 0), (1, 1, 0)]


def test_a_failed_delivery_explains_the_next_one() -> None:
    verdict = judge([line(1)], [ALL], [failed(line(1)), acked(line(1), attempt=2)])

    assert (verdict.faults, verdict.queues[0].redelivered) == ([], 1)


def test_poison_that_was_never_acked_has_failed_and_is_not_lost() -> None:
    poison = line(1, amount_cents=5, currency=None)

    verdict = judge([poison], [ALL], [failed(poison, n) for n in range(1, MAX_ATTEMPTS + 1)])

    assert (verdict.faults, verdict.queues[0].failed, verdict.lost) == ([], 1, 0)


@pytest.mark.parametrize(
    ("notes", "word"),
    [
        ([], "never arrived"),
        ([failed(line(1))], "never acked"),
        ([failed(line(1)), acked(line(1))], "attempt 1 was delivered 2 times"),
        ([acked(line(1)), acked(line(1), attempt=2)], "again after its ack"),
        ([acked(line(1), attempt=MAX_ATTEMPTS + 1)], f"of {MAX_ATTEMPTS}"),
        ([acked(line(1)), acked(line(2))], "filter refuses"),
    ],
)
def test_whatever_should_not_be_is_found(notes: list[Delivery], word: str) -> None:
    (fault,) = faults_of([line(1)], notes)

    assert word in fault


def test_a_message_in_a_queue_whose_filter_refuses_it_is_found() -> None:
    lines = [line(1, "us")]

    (fault,) = faults_of(lines, [acked(lines[0], queue="eu")], EU)

    assert "filter refuses" in fault


def test_sabotage_makes_one_entry_lost() -> None:
    lines = [line(1), line(2)]

    verdict: Verdict = judge(lines, [ALL], drop_one([failed(line(1)), *map(acked, lines)][1:]))

    assert verdict.lost == 1


def test_the_file_is_what_its_script_makes() -> None:
    made = [json.dumps(event, ensure_ascii=False, separators=(",", ":")) for event in events()]

    assert EVENTS_FILE.read_text(encoding="utf-8").splitlines() == made


@pytest.mark.parametrize("queue", QUEUES, ids=lambda queue: queue.queue_id)
def test_both_forms_of_a_filter_agree_on_every_event(queue: DemoQueue) -> None:
    compiled = Filter(queue.filter)

    for event in events():
        judged = compiled.matches(context(Facts(headers_of(event))))
        assert bool(queue.matches(event)) == judged, event
