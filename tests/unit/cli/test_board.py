"""`slatemq top`: what its board shows, in terminals of all sizes, and which keys change it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slatemq._admin.instance import Status
from slatemq._admin.queue_models import queue_of
from slatemq._admin.rates import UNKNOWN, QueueRates, Sample, rates_between, sum_rates
from slatemq.cli.monitor.board import Board, short_age, short_count, short_rate
from slatemq.cli.monitor.keys import keys_in
from slatemq.models import RouteStatus, ServiceStatus
from slatemq.v1 import queue_pb2

LONG = "production.billing.invoices.created.v2"
SERVICES = [ServiceStatus(one, 0, "127.0.0.1:1", True) for one in ("ingest", "router", "broker")]


def queue(name: str, waiting: int = 0, *, entered: int = 0, acked: int = 0) -> queue_pb2.Queue:
    made = queue_pb2.Queue(queue_id=name, filter="true", created_at_ms=1)
    made.counts.available_count = waiting
    made.totals.entered_count = entered
    made.totals.acked_count = acked
    return made


def sample(*queues: queue_pb2.Queue, at_s: float = 0.0, services: int = 3) -> Sample:
    routes = [RouteStatus(0, 0, 5, 12, 7)]
    found = [queue_of(one) for one in queues]
    return Sample(Status(SERVICES[:services], routes, found, []), at_s)


def board_of(*samples: Sample) -> Board:
    board = Board("127.0.0.1:7420", "2s")
    for one in samples:
        board.update(one)
    return board


def text(board: Board, width: int = 110, height: int = 20) -> str:
    return "\n".join(line.plain for line in board.lines(width, height))


def shown(board: Board) -> list[str]:
    return [row.queue.queue_id for row in board.rows()]


def test_rates_are_what_has_grown_between_two_looks() -> None:
    before = sample(queue("orders", entered=100, acked=90), queue("restarted", entered=9))
    now = sample(
        queue("orders", entered=300, acked=100), queue("restarted", entered=1), queue("new"), at_s=2
    )

    rates = rates_between(before, now)

    assert (rates["orders"].in_per_s, rates["orders"].out_per_s) == (100, 5)
    assert rates["restarted"].in_per_s is None
    assert rates["new"].out_per_s is None


def test_a_queue_that_was_made_again_has_no_rates_yet() -> None:
    again = queue("orders", entered=500)
    again.created_at_ms = 2

    rates = rates_between(sample(queue("orders", entered=100)), sample(again, at_s=1))

    assert rates["orders"].in_per_s is None


def test_rates_together_leave_out_queues_that_have_none_yet() -> None:
    half = QueueRates(1.0, 2.0, 3.0, 4.0)

    assert sum_rates([half, UNKNOWN, half]) == QueueRates(2.0, 4.0, 6.0, 8.0)
    assert sum_rates([UNKNOWN]) == sum_rates([]) == UNKNOWN


def test_it_shows_rates_depth_and_lag() -> None:
    board = board_of(
        sample(queue("orders", entered=1)), sample(queue("orders", 3, entered=41), at_s=2)
    )

    said = text(board)

    assert "3 of 3 services serving, lag 7" in said
    assert "in/s 20" in said
    row = next(line for line in said.splitlines() if line.startswith("orders"))
    assert row.split()[1:] == ["20", "0", "0", "3", "0", "0", "0", "-", "7"]


def test_a_lag_that_is_not_known_is_not_shown_as_none() -> None:
    orders = sample(queue("orders"))
    stale = RouteStatus(0, 0, 5, 5, 0, is_current=False)
    for routes in ([], [stale]):
        status = replace(orders.status, routes=routes)
        board = board_of(orders._replace(status=status))

        (row,) = board.rows()

        assert "3 of 3 services serving, lag unknown" in text(board)
        assert row.fields()["lag_count"] is None
        assert text(board).splitlines()[5].split()[-1] == "-"


def test_queues_that_a_broker_did_not_list_are_said_to_be_missing() -> None:
    one = sample()
    status = replace(one.status, unlisted_brokers=[0])

    said = text(board_of(one._replace(status=status)))

    assert "broker shard 0 did not list its queues" in said


@pytest.mark.parametrize("height", [2, 8, 20])
def test_what_is_down_is_named_before_why_in_a_terminal_of_any_height(height: int) -> None:
    one = sample(queue("orders"))
    down = ServiceStatus("broker", 3, "127.0.0.1:1", False, "waits for the store" * 9)
    status = Status([*SERVICES, down], [], [], [3])

    said = text(board_of(one._replace(status=status)), 110, height)

    missing = "broker shard 3 did not list its queues: they are missing"
    assert f"down: broker 3; {missing}; broker 3: waits for the store" in said


@given(width=st.integers(1, 200), height=st.integers(1, 60), rows=st.integers(0, 100))
def test_it_fits_any_terminal(width: int, height: int, rows: int) -> None:
    names = [f"{LONG}-{n}" for n in range(rows)]
    board = board_of(sample(*(queue(name, 10**n) for n, name in enumerate(names[:18]))))

    lines = board.lines(width, height)

    assert len(lines) <= height
    assert all(line.cell_len <= width for line in lines)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_no_column_is_cut(width: int) -> None:
    board = board_of(sample(queue(LONG, 1_234_567)))

    line = next(one for one in text(board, width).splitlines() if one.startswith("prod"))

    assert line.count("…") <= 1
    assert "1.23M" in line


def test_the_first_sorted_by_waiting_and_keys_change_that() -> None:
    board = board_of(sample(queue("a", 1), queue("b", 3), queue("c", 2)))
    assert shown(board) == ["b", "c", "a"]

    board.press("r")
    assert shown(board) == ["a", "c", "b"]
    board.press("r")

    for _ in range(4):
        board.press("left")
    assert "queue▲" in text(board)
    assert shown(board) == ["a", "b", "c"]
    board.press("S")
    assert "lag▼" in text(board)
    board.press("s")
    assert "queue▲" in text(board)


def test_a_filter_is_typed_and_cleared() -> None:
    board = board_of(sample(queue("orders"), queue("Bills"), queue("quotes")))

    for key in ("/", "x", "backspace", "q", "U", "enter"):
        assert board.press(key)
    assert shown(board) == ["quotes"]
    assert "filter: qU" in text(board)

    board.press("escape")
    assert len(shown(board)) == 3
    assert not board.press("q")


def test_rows_scroll_within_the_terminal() -> None:
    board = board_of(sample(*(queue(f"q{n:03}", 1000 - n) for n in range(100))))
    assert "1-10 of 100" in text(board, 80, 16)

    for key in ("down", "pagedown", "j"):
        board.press(key)
        text(board, 80, 16)
    assert "13-22 of 100" in text(board, 80, 16)
    for _ in range(20):
        board.press("pagedown")
        text(board, 80, 16)
    assert "91-100 of 100" in text(board, 80, 16)
    board.press("home")
    assert "1-10 of 100" in text(board, 80, 16)


def test_names_cannot_move_the_cursor() -> None:
    strange = ServiceStatus("broker", 0, "127.0.0.1:1", False, "\x1b[2J")
    one = sample(queue("orders"))

    assert "\x1b" not in text(board_of(one._replace(status=Status([strange], [], [], []))))


def test_a_look_that_fails_keeps_the_numbers_and_says_why() -> None:
    board = board_of(sample(queue("orders", 5)))
    board.problem = "no answer, asking again: connection refused"

    said = text(board)

    assert "connection refused" in said
    assert "orders" in said


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0"), (99_999, "99999"), (100_000, "100k"), (1_234_567, "1.23M"), (3e9, "3G")],
)
def test_counts_are_short(value: float, said: str) -> None:
    assert short_count(value) == said


@pytest.mark.parametrize(
    ("value", "said"), [(0, "0"), (0.01, "<0.1"), (0.25, "0.2"), (9.94, "9.9"), (12.4, "12")]
)
def test_rates_are_short_and_small_ones_are_not_0(value: float, said: str) -> None:
    assert short_rate(value) == said


@pytest.mark.parametrize(
    ("value", "said"), [(0, "0s"), (59_000, "59s"), (3_000_000, "50m"), (7_200_000, "2h")]
)
def test_ages_are_short(value: float, said: str) -> None:
    assert short_age(value) == said


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"q", ["q"]),
        (b"\x1b[A\x1b[B", ["up", "down"]),
        (b"\x1b", ["escape"]),
        (b"\x1b[6~x", ["pagedown", "x"]),
        (b"\x1b[15~", []),
        ("ö\r\x7f".encode(), ["ö", "enter", "backspace"]),
    ],
)
def test_what_a_terminal_sends_are_keys(data: bytes, keys: list[str]) -> None:
    assert keys_in(data) == keys
