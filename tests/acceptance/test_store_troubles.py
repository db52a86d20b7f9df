"""A whole stack on S3 while its store is in trouble."""

from pathlib import Path

import pytest

from tests.faults import store_troubles
from tests.faults.faulty_store import Fault, Outcome
from tests.faults.store_troubles import TROUBLES, Trouble, run_store
from tests.forms import proof

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.s3]

LOST_AT_START = TROUBLES[1]


def test_all_that_a_store_does_wrong_and_that_services_start_on_is_a_trouble() -> None:
    outcomes = {fault.outcome for one in TROUBLES for fault in one.faults()}
    assert outcomes == set(Outcome) - {Outcome.STALE}


@pytest.mark.parametrize(
    ("troubles", "seconds"),
    [((LOST_AT_START,), 1.0), proof(TROUBLES, 20.0)],
)
def test_after_every_trouble_of_the_store_all_shards_are_back_and_nothing_is_lost(
    tmp_path: Path, troubles: tuple[Trouble, ...], seconds: float
) -> None:
    work, found = run_store(tmp_path, seconds, seed=1, troubles=troubles)

    assert found == []
    assert work is not None
    assert work.missing() == 0


def test_a_wait_that_runs_out_ends_the_run_with_what_did_not_come_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given owners that cannot open their shards while they are waited for
    monkeypatch.setattr(store_troubles, "RESTART_SECONDS", 0.5)
    down = Trouble("owners killed, no connection", lambda: (Fault(Outcome.RESET),), kills=True)

    work, (early,) = run_store(tmp_path, 0.1, seed=1, troubles=(down,))

    assert work is None
    assert early.startswith(
        "ended early: owners killed, no connection: ingest does not serve again"
    )
