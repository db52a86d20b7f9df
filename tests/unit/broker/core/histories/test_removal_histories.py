"""Histories in which messages fail, are archived, come back, and are pruned, over and over."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from services.broker.core.batches.execute import Command, Complete, Fail
from tests.forms import examples
from tests.unit.broker.core.histories.histories import queue_ids
from tests.unit.broker.core.histories.removal_histories import some
from tests.unit.broker.core.histories.test_histories import Histories


class RemovalHistories(Histories):
    """The rules that are None here do not run; the one more ends what it claims."""

    ack = extend = release = fail = expire = None  # type: ignore[assignment]
    peek = browse = look = cancel = reschedule = None  # type: ignore[assignment]
    execute = execute_again = forget = stand_still = backfill = None  # type: ignore[assignment]
    plain_execute = update = update_retries = nack = plain_claim = None  # type: ignore[assignment]

    @rule(
        queue_id=queue_ids,
        kinds=st.lists(st.sampled_from([0, 0, 0, 60, 500]), min_size=1, max_size=8),
        done=st.integers(0, 3),
    )
    def finish(self, queue_id: str, kinds: list[int], done: int) -> None:
        """Messages come, with these retentions; some are acked, the others fail."""
        if self.queue(queue_id) is None:
            return
        self.plain_assign(1, [(queue_id, 0, 0, retention_ms) for retention_ms in kinds])
        self.claim(queue_id, len(kinds), 60_000, None, False)
        tokens = [held.token for held in self.model.queues[queue_id].held().values()]
        commands: list[Command] = [
            Complete(token) if n < done else Fail(token, "no") for n, token in enumerate(tokens)
        ]
        if commands:
            self.run_execute("", commands, False)

    # Rules that find nothing to do show nothing: first there is something.

    def take(self, queue_id: str, chosen: list[bool], wrong: int, by_ms: int | None) -> None:
        self.create(queue_id, 2, 50)
        if queue_id in self.model.queues and not self.model.queues[queue_id].failed():
            self.finish(queue_id, [0, 60, 0, 500, 0], 1)
        super().take(queue_id, chosen, wrong, by_ms)

    @rule(queue_id=queue_ids, chosen=some, wrong=st.integers(0, 5))
    def come_back(self, queue_id: str, chosen: list[bool], wrong: int) -> None:
        if queue_id in self.model.queues and not self.model.queues[queue_id].archived():
            self.archive(queue_id, [True, True, False], 5)
        super().come_back(queue_id, chosen, wrong)

    def nothing_is_lost_in_the_end(self) -> None:
        """Needs the rules that do not run here; test_histories has it."""


TestRemovalHistories = RemovalHistories.TestCase
if settings.get_current_profile_name() != "thorough":
    TestRemovalHistories.settings = settings(
        max_examples=examples(200),
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
