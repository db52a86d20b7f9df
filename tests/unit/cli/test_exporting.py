"""The pages of an export: how long they are, and what it says of those that are missing."""

import io
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from slatemq._admin.entry_models import Entry, EntryPage, EntryState, StoredMessage
from slatemq.cli.app import invoke
from slatemq.cli.failures import EXIT_DONE, EXIT_UNREACHABLE
from slatemq.cli.files.exporting import (
    FIRST_PAGE_COUNT,
    PAGE_BYTES,
    PAGE_COUNT_MAX,
    next_size,
    write_export,
)
from slatemq.cli.session import Session
from slatemq.errors import INCOMPLETE, Unavailable


def entries(count: int, payload_bytes: int) -> list[Entry]:
    message = StoredMessage(1, b"x" * payload_bytes, {}, 0, 0, 0)
    return [Entry("h", "q", 1, EntryState.AVAILABLE, message=message)] * count


@pytest.mark.parametrize(
    ("payload_bytes", "count"),
    [
        (0, PAGE_COUNT_MAX),
        (100, PAGE_COUNT_MAX),
        (PAGE_BYTES // 100, 100),
        (PAGE_BYTES, 1),
        (32 * PAGE_BYTES, 1),
    ],
)
def test_a_page_has_as_many_messages_as_fit_into_its_bytes(payload_bytes: int, count: int) -> None:
    size = FIRST_PAGE_COUNT
    for _ in range(5):
        size = next_size(entries(size, payload_bytes), size)

    assert size == count


def test_pages_grow_step_by_step_and_stay_as_they_are_where_nothing_came() -> None:
    gone = Entry("h", "q", 1, EntryState.DONE)  # its message is not stored any more

    assert next_size([gone] * 3, 4) == 16
    assert next_size([], 16) == 16


class TwoPartitions:
    """A queue whose first partition is on a broker that is down."""

    def __init__(self, count: int = 3) -> None:
        self._count = count

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def get_queue(self, _: str) -> Any:
        return SimpleNamespace(counts=SimpleNamespace(available_count=3, failed_count=3))

    async def entry_page(self, *_: Any, page_token: str, **__: Any) -> EntryPage:
        if not page_token:
            return EntryPage([], "1|", {4: Unavailable("does not answer")})
        return EntryPage(entries(self._count, 10), "", {})


@pytest.mark.parametrize("limit", [1, 3, None])
async def test_an_export_says_which_brokers_it_lacks_also_where_it_ends_at_its_limit(
    limit: int | None,
) -> None:
    client: Any = TwoPartitions()
    session: Any = SimpleNamespace(json=True)
    out = io.BytesIO()

    done = await write_export(session, client, "q", EntryState.AVAILABLE, out, limit, {})

    assert (done.messages_count, out.getvalue().count(b"\\id=")) == (limit or 3, limit or 3)
    assert isinstance(done.problem, Unavailable)
    assert done.problem.reason == INCOMPLETE
    assert "broker shard 4 does not answer" in done.problem.message


@pytest.mark.parametrize(("before", "after"), [(None, 0o600), (0o600, 0o600), (0o640, 0o640)])
def test_an_exported_file_is_private_unless_it_was_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before: int | None, after: int
) -> None:
    monkeypatch.setattr(Session, "connect", lambda _: TwoPartitions())
    file = tmp_path / "out.tq"
    if before is not None:
        file.touch()
        file.chmod(before)

    invoke(["export", "q", "--state", "available", "--out", str(file), "--force"])

    assert file.stat().st_size
    assert stat.S_IMODE(file.stat().st_mode) == after


@pytest.mark.parametrize(
    ("count", "options", "is_opened"),
    [(3, ["--limit", "3"], True), (0, ["--limit", "3"], False), (3, [], False)],
)
def test_an_edit_with_a_limit_takes_what_other_brokers_have(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    count: int,
    options: list[str],
    is_opened: bool,
) -> None:
    monkeypatch.setattr(Session, "connect", lambda _: TwoPartitions(count))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    editor = tmp_path / "editor.sh"
    editor.write_text(f'cp "$1" {tmp_path}')
    monkeypatch.setenv("VISUAL", f"sh {editor}")

    code = invoke(["failed", "edit", "q", *options])

    opened = [one.read_text().count("\\id=") for one in tmp_path.glob("*.tq")]
    assert opened == ([3] if is_opened else [])
    assert "broker shard 4 does not answer" in capsys.readouterr().err
    assert code == (EXIT_DONE if is_opened else EXIT_UNREACHABLE)
