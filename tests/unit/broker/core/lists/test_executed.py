"""Request IDs that took effect: how their rows are numbered, and when they go."""

from __future__ import annotations

import pytest

from libs.storage.layout.own_keys import MINUTE_MS, executed_key
from libs.storage.records.execution_records import ExecutedRecord, decode_executed
from services.broker.core.lists import executed
from services.broker.core.lists.executed import WINDOW_MINUTES, Executed, Stored

MINUTE = 29_453_760
NOW_MS = MINUTE * MINUTE_MS


def mark(name: str) -> bytes:
    return name.encode() * 16


def commit(ids: Executed, rows: dict[bytes, bytes], now_ms: int) -> None:
    had_changes, changed = ids.has_changes, list(ids.drain(now_ms))
    assert (had_changes, ids.has_changes) == (True, False)
    for key, value in changed:
        if value is None:
            del rows[key]
        else:
            rows[key] = value


def stored(rows: dict[bytes, bytes], places: list[tuple[int, int]]) -> list[Stored]:
    """What a start reads: all rows that there are, which must be at these places."""
    assert list(rows) == [executed_key(*place) for place in places]
    return [(*place, decode_executed(rows[executed_key(*place)])) for place in places]


def test_commits_of_one_minute_keep_each_others_request_ids_also_over_a_restart() -> None:
    rows: dict[bytes, bytes] = {}
    ids = Executed()
    for name in ("a", "b"):
        ids.add(name, mark(name))
        commit(ids, rows, NOW_MS)
    ids = Executed(stored(rows, [(MINUTE, 1), (MINUTE, 2)]))
    ids.add("c", mark("c"))
    commit(ids, rows, NOW_MS)

    again = Executed(stored(rows, [(MINUTE, 1), (MINUTE, 2), (MINUTE, 3)]))

    assert [again.fingerprint(name) for name in "abcd"] == [*map(mark, "abc"), None]
    assert again.count == 3


def test_a_commit_of_many_request_ids_has_several_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executed, "ROW_REQUEST_IDS_MAX", 2)
    rows: dict[bytes, bytes] = {}
    ids = Executed()
    for name in "abcde":
        ids.add(name, mark(name))
    commit(ids, rows, NOW_MS + MINUTE_MS - 1)

    of_rows = [records for *_, records in stored(rows, [(MINUTE, n) for n in (1, 2, 3)])]

    assert of_rows == [
        [ExecutedRecord(name, mark(name)) for name in part] for part in ("ab", "cd", "e")
    ]


def test_request_ids_of_a_minute_go_together_when_it_is_over_by_ten() -> None:
    rows: dict[bytes, bytes] = {}
    ids = Executed()
    for name, minute in (("a", 0), ("b", 0), ("c", 1)):
        ids.add(name, mark(name))
        commit(ids, rows, NOW_MS + minute * MINUTE_MS)

    ids.forget(NOW_MS + (WINDOW_MINUTES + 1) * MINUTE_MS - 1)
    assert not ids.has_changes
    assert ids.count == 3
    ids.forget(NOW_MS + (WINDOW_MINUTES + 1) * MINUTE_MS)
    commit(ids, rows, NOW_MS + (WINDOW_MINUTES + 1) * MINUTE_MS)

    assert [ids.fingerprint(name) for name in "abc"] == [None, None, mark("c")]
    assert list(rows) == [executed_key(MINUTE + 1, 3)]
