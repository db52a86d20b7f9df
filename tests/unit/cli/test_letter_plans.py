"""What an edited export asks for, letter by letter."""

from pathlib import Path

import pytest

from slatemq._admin.settling import DropDeadLetter
from slatemq.cli.repair.dead_letter_plans import steps


@pytest.mark.parametrize("state", ["=", "-"])
def test_a_dead_letter_whose_id_is_not_that_of_its_handle_is_left_alone(
    tmp_path: Path, state: str
) -> None:
    file = tmp_path / "orders.tq"
    file.write_text(f"{state}text\n\\id=17\n\\handle=orders/1f/9\n\\content=0\n")

    (step,) = steps(str(file), "orders")

    assert step.settlement is None
    assert "its id is not 31, as in its handle" in step.problem


@pytest.mark.parametrize("known", ["\\id=31\n", ""])
def test_one_whose_id_is_that_of_its_handle_or_gone_is_dropped(tmp_path: Path, known: str) -> None:
    file = tmp_path / "orders.tq"
    file.write_text(f"=text\n{known}\\handle=orders/1f/9\n")

    (step,) = steps(str(file), "orders")

    assert step.settlement == DropDeadLetter("orders/1f/9")
    assert not step.problem
