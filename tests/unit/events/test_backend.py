"""Calls and deliveries of a backend that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from libs.events import backend as backends
from libs.events.backend import QueueBackend
from libs.events.deliveries import Handler
from libs.events.refusals import TooLarge
from libs.events.tasks import WriteTask
from slatemq._admin.task_ids import TaskIds
from slatemq.errors import (
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    SlateMQError,
    Unauthenticated,
    Unavailable,
)
from slatemq.events.catalogue import QueueDeleted, make_event
from slatemq.events.envelope import Event, format_timestamp
from tests.integration.waiting import WAIT_SECONDS

EVENT = make_event(
    QueueDeleted(queue="orders"), source="broker-0", request_id="", at_ms=1_771_761_600_000
)

TASK = WriteTask(
    task_id=TaskIds(0).make(1_771_761_600_000),
    operation="Publish",
    created_at=format_timestamp(1_771_761_600_000),
    max_retries=2,
    payload={},
)


class FailingCarrier:
    """Has no server: raises each of some errors once, then delivers an event."""

    def __init__(self, errors: Sequence[Exception]) -> None:
        self._errors = [*errors]

    async def start(self, types: frozenset[str]) -> None:
        """Nothing to create."""

    async def deliver(
        self, types: frozenset[str], handler: Handler, note_up: Callable[[], None]
    ) -> None:
        if self._errors:
            raise self._errors.pop(0)
        await handler(EVENT)
        await asyncio.Event().wait()

    async def publish(self, events: Sequence[Event]) -> None:
        raise self._errors[0]

    async def enqueue(self, task: WriteTask) -> None:
        raise self._errors[0]

    async def dequeue(self) -> WriteTask | None:
        raise self._errors[0]

    async def stop(self) -> None:
        """Nothing is held."""


class Backend(QueueBackend):
    NAME = "the test"
    _translated = staticmethod(nullcontext)

    async def open(self, config: Any) -> None:
        self._compose(config, config)

    async def disconnect(self) -> None:
        """Nothing is open."""

    async def ping(self) -> None:
        """It is up."""


async def test_deliveries_go_on_after_an_error_that_no_code_expects(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Given deliveries that meet an outage, then a fault of this program or of a library
    backend = Backend()
    await backend.connect(FailingCarrier([Unavailable("down"), AttributeError("a fault")]))
    got: asyncio.Queue[Event] = asyncio.Queue()

    # When a handler subscribes, then it gets the event all the same
    await backend.subscribe([], got.put)
    async with asyncio.timeout(WAIT_SECONDS):
        assert await got.get() == EVENT

    # And the fault alone is logged
    (logged,) = caplog.records
    assert "AttributeError: a fault" in caplog.text
    assert "the test" in logged.message
    await backend.close()


@pytest.mark.parametrize(
    "refusal",
    [
        FailedPrecondition("LOGIN", "the password is wrong"),
        PermissionDenied("no rule permits that"),
        Unauthenticated("the token has expired"),
    ],
)
async def test_what_a_backend_refuses_after_the_start_counts_as_down_and_is_logged_once(
    refusal: SlateMQError, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a backend that was connected, and refuses all since
    backend = Backend()
    await backend.connect(FailingCarrier([refusal]))

    # When it is called, then callers are to repeat, as in an outage
    for calling in (
        backend.enqueue_task(TASK),
        backend.enqueue_task(TASK),
        backend.publish(EVENT),
        backend.dequeue_task(),
    ):
        with pytest.raises(Unavailable, match=refusal.message) as raised:
            await calling
        assert raised.value.reason == "BACKEND_DOWN"

    # And the log has it once
    (logged,) = caplog.records
    assert logged.getMessage() == f"the test refuses calls: {refusal.message}"
    await backend.close()


async def test_a_refusal_counts_until_a_like_call_succeeds_or_for_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a backend that refuses tasks, and then nothing
    carrier = FailingCarrier([FailedPrecondition("REFUSED", "no permission")])
    backend = Backend()
    await backend.connect(carrier)
    assert backend.refusal == ""
    with pytest.raises(Unavailable):
        await backend.enqueue_task(TASK)
    assert backend.refusal == "no permission"
    monkeypatch.setattr(carrier, "publish", accept)
    monkeypatch.setattr(carrier, "enqueue", accept)

    # Then what it takes of another kind changes nothing
    await backend.publish(EVENT)
    assert backend.refusal == "no permission"
    # And it refuses nothing where no call was refused for long
    with monkeypatch.context() as later:
        later.setattr(backends, "REFUSAL_S", 0.0)
        assert backend.refusal == ""
    # Nor once it takes a task
    await backend.enqueue_task(TASK)
    assert backend.refusal == ""
    await backend.close()


async def accept(_: object) -> None:
    """As a server that takes all."""


@pytest.mark.parametrize(
    ("refusal", "wanted"),
    [
        (InvalidArgument("queue.rabbitmq.url", "is wrong"), Unavailable),
        (InvalidArgument("task", "is wrong"), InvalidArgument),
        (TooLarge("it is wrong"), TooLarge),
    ],
)
async def test_a_task_is_refused_for_its_own_faults_alone(
    refusal: SlateMQError, wanted: type[SlateMQError]
) -> None:
    backend = Backend()
    await backend.connect(FailingCarrier([refusal]))
    with pytest.raises(wanted, match="is wrong"):
        await backend.enqueue_task(TASK)
    await backend.close()
