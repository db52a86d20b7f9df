"""Lists of queues and redrives in a terminal of 80 columns, and in a pipe."""

from __future__ import annotations

import pytest

from slatemq._admin.queue_models import queue_of
from slatemq._admin.redrives import Redrive, RedriveState
from slatemq.cli.queue import queues
from slatemq.cli.repair import dead_letters
from slatemq.v1 import queue_pb2

LONG = "production.billing.invoices.created.v2"


def queue_with_letters(name: str, *, paused: bool) -> queue_pb2.Queue:
    told = queue_pb2.Queue(queue_id=name, filter="true", paused=paused)
    told.counts.available_count = 1_234_567
    told.counts.archived_count = 3
    return told


def redrive(name: str, into: str) -> Redrive:
    return Redrive("f" * 16, name, into, "", 0, RedriveState.RUNNING, 1, 0, 12_345, 345, 345, "", 0)


@pytest.mark.parametrize("paused", [True, False])
def test_a_list_of_queues_with_long_names_fits_a_terminal_and_is_whole_in_a_pipe(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, paused: bool
) -> None:
    found = [queue_of(queue_with_letters(name, paused=paused)) for name in (LONG, "short")]
    queues._show_queues(found)
    whole = capfdbinary.readouterr().out.decode()
    assert LONG in whole

    monkeypatch.setattr(queues, "line_width", lambda: 80)
    queues._show_queues(found)
    lines = capfdbinary.readouterr().out.decode().splitlines()
    assert max(map(len, lines)) <= 80
    name = lines[1].split("  ")[0]
    assert name.startswith("production.")
    assert name.endswith("… (paused)" if paused else "…")
    assert lines[2].startswith("short (paused) " if paused else "short ")


def test_a_list_of_redrives_with_long_names_fits_a_terminal_and_is_whole_in_a_pipe(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [redrive(LONG, LONG), redrive(LONG, f"{LONG}.again"), redrive("a", "b")]
    dead_letters._show_redrives(found)
    assert f"{LONG} into {LONG}.again" in capfdbinary.readouterr().out.decode()

    monkeypatch.setattr(dead_letters, "line_width", lambda: 80)
    dead_letters._show_redrives(found)
    lines = capfdbinary.readouterr().out.decode().splitlines()
    assert max(map(len, lines)) <= 80
    assert "… into produ" in lines[2]
    assert lines[3].endswith("a into b")
