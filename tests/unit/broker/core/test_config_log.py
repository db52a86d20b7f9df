"""What a shard reports of its queues' configs, and what its log says to those who are behind."""

from __future__ import annotations

import pytest

from libs.storage.records.move_records import MoveRecord, MoveStage
from libs.storage.records.replay_records import ReplayRange
from services.broker.core.config_log import ConfigChange, ConfigLog
from services.broker.core.settings import QueueSettings
from slatemq.errors import InvalidArgument
from tests.unit.broker.core.shards import START_MS, Rig

SETTINGS = QueueSettings("true")


def change(queue_id: str, revision: int, routing_revision: int = 1) -> ConfigChange:
    return ConfigChange(queue_id, revision, SETTINGS, routing_revision)


def queue_ids(changes: list[ConfigChange]) -> list[str]:
    return [one.queue_id for one in changes]


# --- The log ----------------------------------------------------------------


def test_a_reader_gets_the_newest_change_of_each_queue_behind_what_it_knows() -> None:
    log = ConfigLog([change("b", 3), change("a", 2), change("c", 1)])
    log.add([change("a", 4), change("d", 5)])

    assert log.after(0) == [change("c", 1), change("b", 3), change("a", 4), change("d", 5)]
    assert queue_ids(log.after(1)) == ["b", "a", "d"]
    assert queue_ids(log.after(3)) == ["a", "d"]
    assert log.after(5) == []


def test_a_reader_goes_on_behind_a_queue_among_those_of_one_revision() -> None:
    log = ConfigLog([*(change(name, 7) for name in ("b", "a", "ab")), change("first", 6)])
    log.add([change("later", 8)])

    assert queue_ids(log.after(7, "a")) == ["ab", "b", "later"]
    assert queue_ids(log.after(7, "b")) == ["later"]
    assert queue_ids(log.after(7)) == ["later"]
    assert queue_ids(log.after(6)) == ["a", "ab", "b", "later"]


def test_a_reader_behind_forgotten_deletions_must_start_over() -> None:
    log = ConfigLog(forgotten_revision=6)

    for revision in (0, 6, 7):
        log.check_remembered(revision, "known_revision")
    for revision in (1, 5):
        with pytest.raises(InvalidArgument) as refused:
            log.check_remembered(revision, "known_revision")
        assert (refused.value.field, refused.value.reason) == (
            "known_revision",
            "REVISION_FORGOTTEN",
        )


def test_a_queue_that_was_made_again_stays_however_many_are_deleted_after_it() -> None:
    log = ConfigLog([ConfigChange("again", 1, None, 1)], deleted_kept=1)
    log.add([change("again", 2)])
    log.add([ConfigChange(f"gone {number}", number, None, number) for number in (3, 4)])

    assert queue_ids(log.after(0)) == ["again", "gone 4"]
    assert log.forgotten_revision == 3


def test_a_judgement_is_wrong_if_a_queue_was_to_be_judged_otherwise_since() -> None:
    log = ConfigLog([change("filtered", 3, 3), change("paused since", 9, 1)])

    assert [log.routes_differ(revision) for revision in (1, 2, 3, 8, 9)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    log.add([ConfigChange("filtered", 10, None, 10)])
    assert not log.routes_differ(2)
    log.add([change("seldom read", 12, 11)])
    assert [log.routes_differ(revision) for revision in (10, 11)] == [True, False]


# --- What the shard notes ---------------------------------------------------


def test_every_change_of_a_config_is_reported_once_with_its_revision() -> None:
    rig = Rig()
    shard = rig.shard

    orders = shard.create_queue("orders", SETTINGS)
    created = orders.settings
    shard.update_queue(orders, created.changed(paused=True))
    paused = orders.settings
    shard.update_queue(orders, paused.changed(filter="false"))
    filtered = orders.settings

    assert shard.take_config_changes() == [
        ConfigChange("orders", 1, created, 1),
        ConfigChange("orders", 2, paused, 1),
        ConfigChange("orders", 3, filtered, 3),
    ]
    assert [one.revision for one in (created, paused, filtered)] == [1, 2, 3]
    assert shard.take_config_changes() == []

    shard.quarantine(orders, "slow", START_MS)
    shard.lift_quarantine(orders, orders.settings)
    shard.delete_queue(orders)
    *changed, deleted = shard.take_config_changes()
    assert [(one.revision, one.routing_revision) for one in changed] == [(4, 4), (5, 5)]
    assert deleted == ConfigChange("orders", 6, None, 6)


async def test_a_start_reports_all_queues_and_those_that_are_gone() -> None:
    rig = Rig()
    rig.create("kept")
    behind = (ReplayRange(0, 0, 0, 9),)
    rig.shard.create_queue("catching up", SETTINGS, behind)
    rig.shard.delete_queue(rig.create("deleted"))
    move = MoveRecord(MoveStage.LEAVING, number=1, shard=2)
    rig.shard.depart(rig.create("left"), move, rig.now_ms)
    rig.commit()

    await rig.restart()

    # The end of a replay under way may have moved since its queue changed
    kept, catching_up = rig.queue("kept").settings, rig.queue("catching up").settings
    assert sorted(rig.shard.stored_configs()) == [
        ConfigChange("catching up", 6, catching_up, 2),
        ConfigChange("deleted", 4, None, 4),
        ConfigChange("kept", 1, kept, 1),
        ConfigChange("left", 6, None, 6),
    ]
