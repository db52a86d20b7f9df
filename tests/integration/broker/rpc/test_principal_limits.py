"""Limits of the policy on a real broker, through the port for clients."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import grpc.aio
import pytest
import yaml
from google.protobuf.field_mask_pb2 import FieldMask
from google.rpc import error_details_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.access import quotas
from libs.access.callers import Callers
from services.broker.core import redrives
from slatemq._rpc.rpc_status import STATUS_DETAILS_KEY, from_rpc_error
from slatemq._tokens import new_token
from slatemq.errors import ResourceExhausted
from slatemq.v1 import (
    consumer_pb2,
    consumer_pb2_grpc,
    entry_pb2,
    entry_pb2_grpc,
    queue_pb2,
    queue_pb2_grpc,
)
from tests.forms import examples
from tests.integration.broker.entry_calls import fail
from tests.integration.broker.rig import Ingest, Rig, running
from tests.integration.waiting import WAIT_SECONDS, eventually

pytestmark = pytest.mark.usefixtures("cheap_hashes")

ALL: Final = ["publish", "consume", "inspect", "edit", "administer", "operate"]
NAMES: Final = ("shop", "ops")
CHEAP, COSTLY = "headers.a == 'x'", "headers.exists(k, k == 'x')"
"""Of cost 4 and 767."""

TOKENS: Final = cache(new_token)
"""Hashing one takes a tenth of a second."""


class Caller:
    """One principal at the port for clients; an empty name: without a proof."""

    def __init__(self, channel: grpc.aio.Channel, name: str) -> None:
        token = TOKENS(name).token if name else ""
        self._proof = (("authorization", f"Bearer {token}"),) if token else ()
        self._queues: Any = queue_pb2_grpc.QueueServiceStub(channel)
        self._consumers: Any = consumer_pb2_grpc.ConsumerServiceStub(channel)
        self._delayed: Any = entry_pb2_grpc.DelayedServiceStub(channel)
        self._dead_letters: Any = entry_pb2_grpc.DeadLetterServiceStub(channel)

    async def create(self, queue_id: str, **fields: Any) -> queue_pb2.Queue:
        queue = queue_pb2.Queue(queue_id=queue_id, **fields)
        request = queue_pb2.CreateQueueRequest(queue=queue)
        answer = await self._queues.CreateQueue(request, metadata=self._proof)
        return answer.queue  # type: ignore[no-any-return]

    async def update(self, queue_id: str, **fields: Any) -> queue_pb2.Queue:
        request = queue_pb2.UpdateQueueRequest(
            queue=queue_pb2.Queue(queue_id=queue_id, **fields),
            update_mask=FieldMask(paths=[*fields]),
        )
        answer = await self._queues.UpdateQueue(request, metadata=self._proof)
        return answer.queue  # type: ignore[no-any-return]

    async def get(self, queue_id: str) -> queue_pb2.Queue:
        request = queue_pb2.GetQueueRequest(queue_id=queue_id)
        return (await self._queues.GetQueue(request, metadata=self._proof)).queue  # type: ignore[no-any-return]

    async def delete(self, queue_id: str) -> None:
        request = queue_pb2.DeleteQueueRequest(queue_id=queue_id)
        await self._queues.DeleteQueue(request, metadata=self._proof)

    async def redrive(self, queue_id: str, chosen: str = "", rate: int = 0) -> str:
        request = entry_pb2.StartRedriveRequest(queue_id=queue_id, filter=chosen, rate=rate)
        answer = await self._dead_letters.StartRedrive(request, metadata=self._proof)
        return answer.redrive.redrive_id  # type: ignore[no-any-return]

    async def cancel_redrive(self, redrive_id: str) -> None:
        request = entry_pb2.CancelRedriveRequest(redrive_id=redrive_id)
        await self._dead_letters.CancelRedrive(request, metadata=self._proof)

    async def resume_redrive(self, redrive_id: str) -> None:
        request = entry_pb2.ResumeRedriveRequest(redrive_id=redrive_id)
        await self._dead_letters.ResumeRedrive(request, metadata=self._proof)

    async def edit(self, handle: str, payload: bytes) -> None:
        request = entry_pb2.EditMessageRequest(handle=handle, payload=payload)
        await self._delayed.EditMessage(request, metadata=self._proof)

    async def push(self, queue_id: str, headers: dict[str, str]) -> None:
        push = consumer_pb2.PushCommand(queue_id=queue_id, payload=b"x", headers=headers)
        request = consumer_pb2.ExecuteRequest(commands=[consumer_pb2.Command(push=push)])
        await self._consumers.Execute(request, metadata=self._proof)

    def claim(
        self,
        queue_id: str = "q",
        wait_ms: int = 60_000,
        timeout: float | None = None,
        count: int = 1,
    ) -> Any:
        request = consumer_pb2.ClaimRequest(queue_id=queue_id, wait_ms=wait_ms, max_messages=count)
        return self._consumers.Claim(request, metadata=self._proof, timeout=timeout)

    def consume(self, queue_id: str = "q", credit: int = 0) -> Any:
        call = self._consumers.Consume(metadata=self._proof)
        start = consumer_pb2.ConsumeStart(queue_id=queue_id)
        if credit:
            start.credit.messages_count = credit
        return call, consumer_pb2.ConsumeRequest(start=start)

    async def open(self, queue_id: str = "q", credit: int = 0) -> Any:
        """A stream that is open."""
        call, start = self.consume(queue_id, credit)
        await call.write(start)
        assert await call.read() is not grpc.aio.EOF
        return call

    def watch(self) -> Any:
        return self._queues.WatchQueues(queue_pb2.WatchQueuesRequest(), metadata=self._proof)


class Limited:
    """A broker with a policy, and callers."""

    def __init__(self, rig: Rig, channel: grpc.aio.Channel, folder: Path) -> None:
        self.rig = rig
        self.shop, self.ops = Caller(channel, "shop"), Caller(channel, "ops")
        self.unproven = [Caller(channel, ""), Caller(channel, "")]
        self._folder = folder

    @property
    def callers(self) -> Callers:
        callers = self.rig.running._protection.callers
        assert callers is not None
        return callers

    def is_open(self, **counts: int) -> bool:
        found = Counter[str]()
        for (limit, _), count in self.callers.usage.open.items():
            found[limit] += count
        return +found == counts

    def change(self, **limits: int) -> None:
        """Other limits, as after a look at the file."""
        write_policy(self._folder, limits)
        assert self.callers._policy.reload()


def write_policy(folder: Path, limits: Mapping[str, int]) -> None:
    policy = {
        "roles": {"all": [{"verbs": ALL}]},
        "bindings": [{"principals": [*NAMES, "anonymous"], "roles": ["all"]}],
        "limits": [{"principals": ["shop", "anonymous"], **limits}],
    }
    (folder / "policy.yaml").write_text(yaml.safe_dump(policy))


@asynccontextmanager
async def limited(
    folder: Path,
    data: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    ingest: Ingest | None = None,
    **limits: int,
) -> AsyncIterator[Limited]:
    write_policy(folder, limits)
    tokens = {"tokens": [TOKENS(name).entry for name in NAMES]}
    (folder / "tokens.yaml").write_text(yaml.safe_dump(tokens))
    access = {name: str(folder / f"{name[7:]}.yaml") for name in ("access_policy", "access_tokens")}
    async with (
        running(data, ingest=ingest, settings={**access, **(settings or {})}) as rig,
        grpc.aio.insecure_channel(rig.running.address) as channel,
    ):
        yield Limited(rig, channel, folder)


async def refused(call: Awaitable[object], limit: str, *, waits: bool = False) -> None:
    """A call is refused by this limit; `waits`: and says when to try again."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = from_rpc_error(caught.value)
    assert isinstance(error, ResourceExhausted)
    assert (error.reason, error.metadata) == ("PRINCIPAL_LIMIT", {"limit": limit})
    details = dict(caught.value.trailing_metadata() or ())[STATUS_DETAILS_KEY]
    kind = error_details_pb2.RetryInfo.DESCRIPTOR.full_name.encode()
    assert (kind in details) is waits
    assert (error.retry_after_ms is not None) is waits


async def ended(call: Any) -> None:
    """Read a stream until it ends, or fails."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def sent_and_ended(call: Any, request: consumer_pb2.ConsumeRequest) -> None:
    await call.write(request)
    await ended(call)


async def test_one_waits_with_as_many_claims_as_it_may_and_another_with_more(
    tmp_path: Path,
) -> None:
    async with limited(tmp_path, waiting_claims=2) as made:
        await made.ops.create("q")
        waiting = [made.shop.claim() for _ in range(2)]
        await eventually(lambda: made.is_open(waiting_claims=2))

        for wait_ms in (60_000, 0):
            await refused(made.shop.claim(wait_ms=wait_ms), "waiting_claims", waits=True)
        others = [made.ops.claim() for _ in range(5)]
        await eventually(lambda: made.is_open(waiting_claims=7))
        stream = await made.shop.open()

        # What ends leaves its place to the next: cancelled by the client
        waiting[0].cancel()
        await eventually(lambda: made.is_open(waiting_claims=6, open_streams=1))
        again = made.shop.claim()
        await eventually(lambda: made.is_open(waiting_claims=7, open_streams=1))
        # or answered by the server
        for call in others:
            call.cancel()
        await eventually(lambda: made.is_open(waiting_claims=2, open_streams=1))
        await made.rig.assign([1, 2])
        assert [len((await call).runs) for call in (waiting[1], again)] == [1, 1]
        stream.cancel()
        await eventually(lambda: made.is_open())


async def test_a_refusal_that_is_held_back_comes_before_its_caller_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hours for those who wait for as long, and for others by half of their deadline."""
    monkeypatch.setattr(quotas, "PROMPT_REFUSALS_PER_S", 0.0001)
    monkeypatch.setattr(quotas, "HELD_S_MAX", 36_000)
    async with limited(tmp_path, waiting_claims=1) as made:
        await made.ops.create("q")
        waiting = made.shop.claim()
        await eventually(lambda: made.is_open(waiting_claims=1))
        await refused(made.shop.claim(), "waiting_claims", waits=True)

        patient = made.shop.claim()
        held = made.shop.claim(timeout=4)
        async with asyncio.timeout(WAIT_SECONDS):
            while await held.code() is grpc.StatusCode.DEADLINE_EXCEEDED:  # On a busy machine.
                held = made.shop.claim(timeout=4)
        await refused(held, "waiting_claims", waits=True)

        assert not patient.done()
        patient.cancel()
        waiting.cancel()


async def test_streams_of_all_kinds_share_a_limit(tmp_path: Path) -> None:
    async with limited(tmp_path, open_streams=2) as made:
        await made.ops.create("q")
        first, watch = await made.shop.open(), made.shop.watch()
        assert await watch.read() is not grpc.aio.EOF

        for call in (made.shop.consume()[0], made.shop.watch()):
            await refused(ended(call), "open_streams", waits=True)
        # A client that sends at once gets the same answer
        await refused(sent_and_ended(*made.shop.consume()), "open_streams", waits=True)
        assert (await made.shop.get("q")).queue_id == "q"

        # Cut by the client, by the server, and by the end of its queue
        watch.cancel()
        await eventually(lambda: made.is_open(open_streams=1))
        second = await made.shop.open()
        await made.ops.delete("q")
        for call in (first, second):
            with pytest.raises(grpc.aio.AioRpcError):
                await ended(call)
        await eventually(lambda: made.is_open())


async def test_calls_beyond_the_limit_wait_for_their_turns_and_hold_up_no_other(
    tmp_path: Path,
) -> None:
    async with limited(tmp_path, calls_per_s=5) as made:
        await made.ops.create("q")
        await made.shop.get("q")  # proves its token, which few calls at once may wait for
        mine = [asyncio.create_task(made.shop.get("q")) for _ in range(100)]
        for _ in range(20):
            await made.ops.get("q")
        answers = await asyncio.gather(*mine, return_exceptions=True)

        # A second's at once, and those of the next second as they come; the others are refused
        served = sum(not isinstance(answer, BaseException) for answer in answers)
        assert 10 <= served < 100
        assert made.callers.usage.refused == {("calls_per_s", "shop"): 100 - served}
        for answer in answers:
            if isinstance(answer, grpc.aio.AioRpcError):
                assert from_rpc_error(answer).metadata == {"limit": "calls_per_s"}


async def test_an_edit_counts_as_a_publish(tmp_path: Path) -> None:
    async with limited(tmp_path, publish_bytes_per_s=1) as broker:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await broker.shop.edit("q/1/1", bytes(1000))
        assert caught.value.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED

        await refused(broker.shop.edit("q/1/1", b"x"), "publish_bytes_per_s", waits=True)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await broker.ops.edit("q/1/1", b"x")
        assert caught.value.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_the_headers_of_a_push_count_as_its_payload_does(tmp_path: Path) -> None:
    async with limited(tmp_path, publish_bytes_per_s=1) as broker:
        await broker.ops.create("q")
        await broker.shop.push("q", {"long": "x" * 1000})

        await refused(broker.shop.push("q", {}), "publish_bytes_per_s", waits=True)


async def test_callers_without_a_proof_share_their_limits(tmp_path: Path) -> None:
    async with limited(tmp_path, open_streams=1) as made:
        await made.ops.create("q")
        one, other = made.unproven
        await one.open()

        await refused(other.open(), "open_streams", waits=True)
        await made.shop.open()


async def test_other_limits_hold_from_the_next_call_on_and_end_nothing(tmp_path: Path) -> None:
    async with limited(tmp_path, open_streams=1) as made:
        await made.ops.create("q")
        first = await made.shop.open()
        await refused(made.shop.open(), "open_streams", waits=True)

        made.change(open_streams=2)
        second = await made.shop.open()
        made.change(open_streams=1)
        await refused(made.shop.open(), "open_streams", waits=True)

        # Both are open: they end only as their consumers wish
        for call in (first, second):
            await call.done_writing()
            await ended(call)
        await eventually(lambda: made.is_open())


async def test_a_principal_has_so_many_queues_also_after_a_restart(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with limited(tmp_path, data, queues=2) as made:
        await made.ops.create("of-ops")
        for name in ("a", "b"):
            await made.shop.create(name)

        await refused(made.shop.create("c"), "queues")
        # Nor by a queue that another one creates for it
        await refused(made.shop.update("of-ops", filter=CHEAP), "queues")
        await made.shop.update("of-ops", max_attempts=3)
        await made.ops.create("c")
        await made.shop.delete("a")
        await made.shop.create("d")

    async with limited(tmp_path, data, queues=2) as made:
        await refused(made.shop.create("e"), "queues")
        await made.shop.update("d", filter=CHEAP)
        # Another one takes it over
        await made.ops.update("d", filter=COSTLY)
        await made.shop.create("e")
        await refused(made.shop.create("f"), "queues")


async def test_filters_cost_so_much_each_and_together(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with limited(tmp_path, data, filter_cost=800, filter_cost_sum=1600) as made:
        await refused(made.shop.create("q", filter=f"{COSTLY} || {COSTLY}"), "filter_cost")
        costly = {"filter": COSTLY, "priority": "1 + " * 20 + "1"}
        await refused(made.shop.create("q", **costly), "filter_cost")
        for name in ("a", "b"):
            await made.shop.create(name, filter=COSTLY)
        await refused(made.shop.create("c", filter=COSTLY), "filter_cost_sum")
        await made.shop.create("c")

        # Nothing of a change that is refused
        before = await made.shop.get("c")
        await refused(made.shop.update("c", filter=COSTLY, max_attempts=9), "filter_cost_sum")
        assert (await made.shop.get("c")).SerializeToString() == before.SerializeToString()
        await refused(made.shop.redrive("a", f"{COSTLY} || {COSTLY}"), "filter_cost")

    async with limited(tmp_path, data, filter_cost=800, filter_cost_sum=1600) as made:
        await refused(made.shop.update("c", filter=COSTLY), "filter_cost_sum")
        # What costs less makes room, also below a lower limit
        made.change(filter_cost=800, filter_cost_sum=10)
        await made.shop.update("a", filter=CHEAP)
        await made.shop.update("b", filter=CHEAP)
        await refused(made.shop.create("d", filter=COSTLY), "filter_cost_sum")
        await made.ops.create("d", filter=f"{COSTLY} || {COSTLY}")


async def test_a_change_of_a_queue_does_not_wait_for_all_that_another_principal_asks_for(
    tmp_path: Path,
) -> None:
    async with limited(tmp_path, settings={"queue_changes_per_s": 10}) as made:
        for caller, name in ((made.shop, "orders"), (made.ops, "bills")):
            await caller.create(name)
        mine = [asyncio.create_task(made.shop.update("orders", max_attempts=3)) for _ in range(100)]
        await asyncio.wait(mine, return_when=asyncio.FIRST_COMPLETED)

        await made.ops.update("bills", max_attempts=3)

        assert not all(one.done() for one in mine)
        for one in mine:
            one.cancel()
        await asyncio.gather(*mine, return_exceptions=True)


async def test_redrives_of_one_principal_leave_some_to_others_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redrives, "PRINCIPAL_RUNNING_MAX", 2)
    data = tmp_path / "data"
    async with limited(tmp_path, data) as made:
        await made.ops.create("q", max_attempts=1)
        await fail(made.rig, range(1, 1001))
        first, second = [await made.shop.redrive("q", rate=1) for _ in range(2)]
        of_ops = await made.ops.redrive("q", rate=1)
        await too_many(made.shop.redrive("q"))

    async with limited(tmp_path, data) as made:
        await too_many(made.shop.redrive("q"))
        # One that another caller resumes is that caller's
        await made.shop.cancel_redrive(first)
        await made.ops.resume_redrive(first)
        third = await made.shop.redrive("q", rate=1)
        await made.ops.cancel_redrive(of_ops)
        await too_many(made.shop.resume_redrive(of_ops))
        for redrive_id in (first, second, third):
            await made.ops.cancel_redrive(redrive_id)


async def too_many(call: Awaitable[object]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = from_rpc_error(caught.value)
    assert isinstance(error, ResourceExhausted)
    assert error.reason == "TOO_MANY_REDRIVES"


async def test_many_at_once_get_no_more_than_one_may_have(tmp_path: Path) -> None:
    async with limited(tmp_path, queues=5) as made:
        outcomes = await asyncio.gather(
            *(made.shop.create(f"q{number}") for number in range(20)), return_exceptions=True
        )

        assert sum(isinstance(one, queue_pb2.Queue) for one in outcomes) == 5
        assert len(made.rig.owner.shard.queues) == 5
        assert made.callers.usage.refused == {("queues", "shop"): 15}


Step = tuple[str, int]
STEPS: Final[dict[str, Callable[[Limited], Awaitable[Any]]]] = {
    "open": lambda made: made.shop.open(),
    "open nothing": lambda made: made.shop.open("gone"),
    "open badly": lambda made: opened_badly(made.shop),
    "watch": lambda made: watched(made.shop),
    "claim": lambda made: begun(made.shop.claim()),
    "claim nothing": lambda made: made.shop.claim("gone"),
    "claim at once": lambda made: made.shop.claim(wait_ms=0),
}
ENDS: Final = ("cancel", "close", "nonsense", "answer", "delete")


async def opened_badly(caller: Caller) -> Any:
    call, _ = caller.consume()
    await call.write(consumer_pb2.ConsumeRequest(heartbeat=consumer_pb2.ConsumeHeartbeat()))
    await ended(call)


async def watched(caller: Caller) -> Any:
    call = caller.watch()
    await call.read()
    return call


async def begun(call: Any) -> Any:
    await asyncio.sleep(0)
    return call


async def end(made: Limited, how: str, calls: list[Any], at: int) -> None:
    call = calls[at % len(calls)]
    if how == "answer":
        await made.rig.assign([at + 1])
    elif how == "delete":
        await made.ops.delete("q")
        await made.ops.create("q")
    elif how == "cancel" or not hasattr(call, "done_writing"):
        call.cancel()
    elif how == "close":
        await call.done_writing()
    else:
        await call.write(consumer_pb2.ConsumeRequest())


@settings(max_examples=examples(50), deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from((*STEPS, *ENDS)), st.integers(0, 20)), min_size=5, max_size=25
    )
)
def test_whatever_ends_calls_all_places_are_given_back(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Step]
) -> None:
    async def play() -> None:
        folder = tmp_path_factory.mktemp("limited")
        async with AsyncExitStack() as s:
            bounds = {"waiting_claims_max": 8}
            made = await s.enter_async_context(
                limited(folder, settings=bounds, open_streams=3, waiting_claims=3)
            )
            await made.ops.create("q")
            calls: list[Any] = []
            s.callback(lambda: [call.cancel() for call in calls])
            for name, at in steps:
                try:
                    if name in STEPS:
                        call = await STEPS[name](made)
                        calls += [call] if hasattr(call, "cancel") else []
                    elif calls:
                        await end(made, name, calls, at)
                except (grpc.aio.AioRpcError, asyncio.CancelledError, asyncio.InvalidStateError):
                    pass  # It is refused, or has ended before.
                taken = made.callers.usage.open
                assert all(0 <= count <= 3 for count in taken.values()), taken
                assert made.rig.delivery.places.held.get("shop", 0) <= 4
            for call in calls:
                call.cancel()
            await eventually(lambda: made.is_open())
            shares = made.rig.delivery.places, made.rig.running.gate.calls
            await eventually(lambda: not any(one.held for one in shares))

    asyncio.run(play())
