"""Random histories, the part about what waits: purged, cancelled, rescheduled, counted, listed."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from libs.storage.layout.buckets import lane_order, order_in_time, split_bucket, split_order
from libs.storage.layout.keys import RecordType, parse_active_key, queue_state_key
from libs.storage.records.queues import decode_active
from libs.storage.records.states import decode_queue_state
from services.broker.core.commands import Needs, Purge
from services.broker.core.queue import ATTEMPTS_USED_UP, Queue
from services.broker.core.waiting.bucket import Place
from services.broker.entries.waiting_pages import QueuePosition, WaitingReader
from tests.unit.broker.core.histories.histories import queue_ids, slowly
from tests.unit.broker.core.histories.model import Failed, ModelQueue, Waiting
from tests.unit.broker.core.histories.replay_histories import ReplayHistory
from tests.unit.storage.oracles import record_type_of

purge_kinds = st.sampled_from(
    [
        {Purge.AVAILABLE},
        {Purge.AVAILABLE},
        {Purge.IN_FLIGHT},
        {Purge.DONE},
        {Purge.FAILED},
        {Purge.ARCHIVED},
        set(Purge),
    ]
)


class EntryHistory(ReplayHistory):
    """Its rules change and read what waits."""

    @rule(queue_id=queue_ids, kinds=purge_kinds, sure=st.integers(0, 3))
    def purge(self, queue_id: str, kinds: set[Purge], sure: int) -> None:
        queue = self.queue(queue_id)
        if queue is None or sure:
            return
        self.tick()
        if not queue.can_purge_available:
            assert len(queue.garbage_epochs) + len(queue.waiting.garbage_epochs) >= 30
            return
        expected = self.model.queues[queue_id]
        self.settle(queue, expected)
        before = len(expected.entries)
        gone: set[int] = set()
        if Purge.AVAILABLE in kinds:
            gone |= expected.waiting().keys()
            expected.purges += 1
        if Purge.IN_FLIGHT in kinds:
            gone |= expected.held().keys()
            for held in expected.held().values():
                self.model.finished[held.token] = "ended"
        if Purge.DONE in kinds:
            gone |= expected.done().keys()
        if Purge.FAILED in kinds:
            gone |= expected.failed().keys()
        if Purge.ARCHIVED in kinds:
            gone |= expected.archived().keys()

        count = self.shard.purge(queue, kinds)

        for message_id in gone:
            del expected.entries[message_id]
        assert count == before - len(expected.entries)

    def settle(self, queue: Queue, expected: ModelQueue) -> None:
        """Takes over what claims have dropped since the last commit."""
        used_up = {failed.message_id for failed in queue.failed._new}
        for message_id, entry in expected.waiting().items():
            if message_id in used_up:
                assert entry.attempts >= expected.lowest_max_attempts
                expected.entries[message_id] = Failed(entry.attempts, ATTEMPTS_USED_UP)
            elif not self.is_there(queue, message_id):
                assert entry.expired(expected.walked_ms), f"{message_id} is lost"
                expected.expire(message_id)

    def may_be_gone(self, expected: ModelQueue, entry: Waiting) -> bool:
        return entry.expired(expected.walked_ms) or entry.attempts >= expected.lowest_max_attempts

    def is_there(self, queue: Queue, message_id: int) -> bool:
        place = self.place_of(queue, message_id)
        try:
            return place is not None and queue.waiting.find(place, message_id) is not None
        except Needs:
            return True  # memory does not know: the row is right

    # --- One entry ----------------------------------------------------------

    def place_of(self, queue: Queue, message_id: int) -> Place | None:
        for lane in queue.waiting.lanes():
            for bucket in lane.in_memory():
                if bucket.index_of(message_id) is not None:
                    return Place(lane.priority, lane.kind, bucket.order)
        state = decode_queue_state(self.store.rows[queue_state_key(queue.queue_id)])
        offsets = {Place(o.priority, o.kind, o.head_order): o.head_offset for o in state.lanes}
        for key, value in self.store.rows.items():
            if record_type_of(key) is not RecordType.ACTIVE:
                continue
            parsed = parse_active_key(key)
            if parsed.queue != queue.queue_id or not parsed.bucket:
                continue
            priority, kind, order = split_bucket(parsed.bucket)
            place = Place(priority, kind, lane_order(kind, order, parsed.number))
            waiting = decode_active(value)[0][offsets.get(place, 0) :]
            is_live = split_order(order).epoch == queue.waiting.epoch
            if is_live and any(item.message_id == message_id for item in waiting):
                return place
        return None

    def pick(self, queue_id: str, chosen: int) -> tuple[Queue, Place, int] | None:
        queue = self.queue(queue_id)
        waiting = sorted(self.model.queues[queue_id].waiting()) if queue else []
        if queue is None or not waiting:
            return None
        message_id = waiting[chosen % len(waiting)]
        place = self.place_of(queue, message_id)
        if place is None:
            entry = self.model.queues[queue_id].waiting()[message_id]
            assert self.may_be_gone(self.model.queues[queue_id], entry), "it is nowhere"
            return None
        return queue, place, message_id

    @rule(queue_id=queue_ids, chosen=st.integers(0, 40), slow=slowly)
    def cancel(self, queue_id: str, chosen: int, slow: bool) -> None:
        found = self.pick(queue_id, chosen)
        if found is not None:
            queue, place, message_id = found
            self.run(lambda now: self.cancel_now(queue, place, message_id, slow), slow)

    def cancel_now(self, queue: Queue, place: Place, message_id: int, slow: bool) -> None:
        if self.queue(queue.queue_id) is not queue:
            return
        item = queue.waiting.cancel(place, message_id)

        expected = self.model.queues[queue.queue_id]
        entry = expected.waiting().get(message_id)
        if item is None:
            assert slow or entry is None or self.may_be_gone(expected, entry)
            return
        assert entry is not None, "what was not there is cancelled"
        assert (item.attempts, item.priority) == (entry.attempts, entry.priority)
        expected.take_out(message_id)
        expected.attempts.pop(message_id, None)

    @rule(
        queue_id=queue_ids,
        chosen=st.integers(0, 40),
        later_ms=st.sampled_from([-100, 0, 50, 100, 100, 400, 3000]),
        slow=slowly,
    )
    def reschedule(self, queue_id: str, chosen: int, later_ms: int, slow: bool) -> None:
        found = self.pick(queue_id, chosen)
        if found is None:
            return
        queue, place, message_id = found
        at_ms = (self.now_ms + later_ms) // 50 * 50
        self.run(lambda now: self.reschedule_now(queue, place, message_id, at_ms, now, slow), slow)

    def reschedule_now(
        self, queue: Queue, place: Place, message_id: int, at_ms: int, now_ms: int, slow: bool
    ) -> None:
        if self.queue(queue.queue_id) is not queue:
            return
        expected = self.model.queues[queue.queue_id]
        entry = expected.waiting().get(message_id)
        there = queue.waiting.find(place, message_id) is not None
        moved = queue.waiting.reschedule(place, message_id, at_ms, now_ms)
        if entry is None:
            assert moved is None
            return
        if moved is None:
            expired = entry.expired(max(now_ms, expected.walked_ms))
            assert slow or expired or self.may_be_gone(expected, entry)
            if there:
                assert expired
                expected.expire(message_id)
            return
        expected.take_out(message_id)
        expected.entries[message_id] = self.waiting(
            expected, entry.priority, at_ms, entry.deadline_ms, entry.attempts, now_ms
        )
        found = queue.waiting.find(moved, message_id)
        assert found is not None
        assert found.visible_at_ms in (0, at_ms)

    # --- What is due --------------------------------------------------------

    @rule(queue_id=queue_ids, limit=st.sampled_from([1, 3, 100]), slow=slowly)
    def look(self, queue_id: str, limit: int, slow: bool) -> None:
        queue = self.queue(queue_id)
        if queue is not None:
            self.run(lambda now: self.look_now(queue, limit, now), slow)

    def look_now(self, queue: Queue, limit: int, now_ms: int) -> None:
        if self.queue(queue.queue_id) is not queue:
            return
        expected = self.model.queues[queue.queue_id]
        if queue.waiting.has_due(now_ms):
            expected.walked_ms = max(expected.walked_ms, now_ms)
            queue.waiting.drop_expired(now_ms, limit)
        if not queue.waiting.has_due(now_ms):
            self.all_due_is_counted(queue, expected, now_ms)

    def all_due_is_counted(self, queue: Queue, expected: ModelQueue, now_ms: int) -> None:
        counts = queue.waiting.counts(now_ms)
        waiting = expected.waiting().values()
        over = sum(self.may_be_gone(expected, one) for one in waiting)
        left = [
            one
            for one in waiting
            if not (one.timed and one.deadline_ms and one.visible_at_ms > one.deadline_ms)
            or one.deadline_ms > now_ms
        ]
        assert counts.available + counts.delayed <= len(left), "it did not leave at its deadline"
        surely = len(expected.surely_visible(now_ms))
        due = [o for o in waiting if not o.timed or o.visible_at_ms <= expected.walked_ms]
        assert surely <= counts.available <= len(due) + over
        assert (counts.oldest_claimable_ms is None) == (not counts.available)

    # --- Reading ------------------------------------------------------------

    @rule(queue_id=queue_ids, limit=st.sampled_from([1, 2, 5, 100]))
    def browse(self, queue_id: str, limit: int) -> None:
        queue = self.queue(queue_id)
        if queue is None:
            return
        self.store.slow = False
        self.loop.run_until_complete(self.browse_now(queue, limit))

    async def browse_now(self, queue: Queue, limit: int) -> None:
        expected = self.model.queues[queue.queue_id]
        now_ms = self.now_ms
        reader = WaitingReader(self.store)
        lists: list[list[int]] = []
        for delayed in (False, True):
            ids: list[int] = []
            after: QueuePosition | None = None
            while True:
                page = await reader.page(
                    queue, delayed=delayed, after=after, limit=limit, now_ms=now_ms
                )
                assert len(page.entries) <= limit
                for place, item in page.entries:
                    order = order_in_time(place.kind, place.order)
                    assert queue.waiting.epoch == split_order(order).epoch
                    ids.append(item.message_id)
                after = page.next
                if after is None:
                    break
            lists.append(ids)
        listed = [*lists[0], *lists[1]]
        assert len(set(listed)) == len(listed), "one message twice"
        waiting = expected.waiting()
        assert set(listed) <= waiting.keys()
        surely = {
            message_id
            for message_id, entry in waiting.items()
            if not self.may_be_gone(expected, entry) and not entry.expired(now_ms)
        }
        assert surely <= set(listed), "left out"
        for message_id in lists[0]:
            assert not waiting[message_id].timed or waiting[message_id].visible_at_ms <= now_ms
        for ids in lists:
            given = [waiting[message_id] for message_id in ids]
            # Those that are never delivered stand where their retention ends.
            given = [one for one in given if not 0 < one.deadline_ms < one.visible_at_ms]
            for index, earlier in enumerate(given):
                for later in given[index + 1 :]:
                    assert earlier.priority <= later.priority
                    if earlier.priority == later.priority:
                        assert not later.surely_before(earlier)
        for message_id in list(surely)[:2]:
            assert await reader.locate(queue, message_id, [0]) == self.place_of(queue, message_id)
        found = {
            item.message_id async for chunk in reader.chunks(queue, 0) for _, item in chunk.entries
        }
        assert surely <= found <= waiting.keys()
