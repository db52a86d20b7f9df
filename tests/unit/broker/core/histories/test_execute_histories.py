"""Random histories that are mostly lists of commands: what else a shard does is left out."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.forms import examples
from tests.unit.broker.core.histories.test_histories import Histories


class CommandHistories(Histories):
    """The rules that are None here do not run."""

    ack = extend = release = fail = None  # type: ignore[assignment]
    peek = browse = look = None  # type: ignore[assignment]
    purge = cancel = reschedule = delete = sweep = None  # type: ignore[assignment]


TestCommandHistories = CommandHistories.TestCase
if settings.get_current_profile_name() != "thorough":
    TestCommandHistories.settings = settings(
        max_examples=examples(250),
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
