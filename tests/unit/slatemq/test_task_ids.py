import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.events.tasks import WriteTask
from slatemq._admin.task_ids import PREFIX, TaskIds, parse_task_id
from slatemq.errors import InvalidArgument

times = st.integers(1, (1 << 47) - 1)
shards = st.integers(0, 16_383)


@given(times, shards)
def test_an_id_shows_its_time_and_shard_and_tasks_may_have_it(at_ms: int, shard: int) -> None:
    text = TaskIds(shard).make(at_ms)
    WriteTask(task_id=text, operation="Publish", created_at="2026-02-22T12:00:00Z", payload={})
    named = parse_task_id(text)
    assert (named.accepted_at_ms, named.shard, len(named.ulid)) == (at_ms, shard, 16)


def test_ids_of_one_process_differ_and_sort_as_they_were_made() -> None:
    ids = TaskIds(3)
    made = [ids.make(at_ms) for at_ms in (5, 5, 5, 4, 6, 6)]
    ulids = [parse_task_id(text).ulid for text in made]
    assert len(set(ulids)) == len(ulids)
    assert ulids[:4] == sorted(ulids[:4])
    assert ulids[3] < ulids[4]


@given(shards, st.integers(0, 25), st.sampled_from("0123456789ABCDEFGHJKMNPQRSTVWXYZ"))
def test_an_id_with_one_wrong_character_is_refused(shard: int, place: int, digit: str) -> None:
    text = TaskIds(shard).make(1_771_761_600_000)
    at = len(PREFIX) + place
    wrong = text[:at] + digit + text[at + 1 :]
    if wrong != text:
        with pytest.raises(InvalidArgument) as refused:
            parse_task_id(wrong)
        assert refused.value.field == "task_id"


@pytest.mark.parametrize("text", ["", "task_", "x", "task_" + "0" * 25, "task_" + "l" * 26])
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_task_id(text)
