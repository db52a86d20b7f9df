from pathlib import Path

import pytest

from slatemq.cli.publish.lines import Batch
from slatemq.cli.publish.runs import Run
from slatemq.models import OutgoingMessage


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "slatemq" / "publish"


def batch(*payloads: bytes, first: int = 1, headers: dict[str, str] | None = None) -> Batch:
    return Batch(first, [OutgoingMessage(payload, headers or {}) for payload in payloads], 0, 0)


def test_a_run_after_one_that_failed_gives_the_same_ids_and_shards() -> None:
    # Given a run that did not get to its end
    first = Run("/a", ["options"], [0, 1, 2])
    id_then = first.request_id(batch(b"x"))
    shard_then = first.shard(id_then)
    first.close()

    # When there is one more shard
    second = Run("/a", ["options"], [0, 1, 2, 3])

    # Then its batches still go where they went
    assert second.request_id(batch(b"x")) == id_then
    assert second.shard(id_then) == shard_then
    second.close()


def test_a_run_after_one_that_was_complete_gives_others(state: Path) -> None:
    first = Run("/a", [], [0])
    first.finish()

    second = Run("/a", [], [0])

    assert second.request_id(batch(b"x")) != first.request_id(batch(b"x"))
    second.finish()
    assert list(state.iterdir()) == []


@pytest.mark.parametrize("before_was_in_doubt", [None, True])
def test_a_run_whose_batches_are_all_known_leaves_a_file_only_for_the_one_before(
    state: Path, before_was_in_doubt: bool | None
) -> None:
    # Given no run before, or one that ended with batches in doubt
    if before_was_in_doubt:
        assert Run("/a", [], [0]).stop(in_doubt=True)

    run = Run("/a", [], [0])

    assert run.stop(in_doubt=False) is bool(before_was_in_doubt)
    assert len(list(state.iterdir())) == bool(before_was_in_doubt)


@pytest.mark.parametrize(("source", "options"), [("/b", []), ("/a", ["--to q"])])
def test_another_source_or_other_options_are_another_run(source: str, options: list[str]) -> None:
    Run("/a", [], [0]).close()
    failed, other = Run("/a", [], [0]), Run(source, options, [0])

    assert failed.request_id(batch(b"x")) != other.request_id(batch(b"x"))
    failed.close()
    other.close()


def test_a_run_beside_one_that_goes_on_is_its_own() -> None:
    first = Run("/a", [], [0])

    second = Run("/a", [], [0])

    assert second.secret != first.secret
    assert not second.kept
    first.close()


def test_what_cannot_be_remembered_can_be_published(state: Path) -> None:
    state.parent.mkdir(parents=True)
    state.write_text("a file in the folder's place")

    run = Run("/a", [], [0])

    assert not run.kept
    assert run.request_id(batch(b"x"))
    run.finish()


def test_a_damaged_memory_is_no_memory(state: Path) -> None:
    Run("/a", [], [0]).close()
    for path in state.iterdir():
        path.write_text('{"secret": 7')

    run = Run("/a", [], [0])

    assert run.kept
    run.finish()


def test_every_difference_between_batches_shows_in_the_id() -> None:
    run = Run("/a", [], [0])
    batches = [
        batch(b"x"),
        batch(b"x", first=2),
        batch(b"y"),
        batch(b"x", b""),
        batch(b"", b"x"),
        batch(b"x", headers={"a": "b"}),
        batch(b"x", headers={"a": "", "b": ""}),
    ]

    ids = {run.request_id(one) for one in batches}

    assert len(ids) == len(batches)
    run.finish()
