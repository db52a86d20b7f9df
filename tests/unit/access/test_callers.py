"""Calls are judged by who makes them, before they are served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import yaml

from libs.access import callers as callers_module
from libs.access.audit import Act
from libs.access.callers import NAMED_MAX, Caller, Callers
from libs.access.methods import access_of
from libs.access.policy import Policy
from libs.access.principals import Principal
from libs.access.reloading import ReloadedFile
from libs.access.token_file import TokenFile
from libs.events.slatemq.headers import TASKS_HEADER
from libs.serving.process.logs import REPEATS_MAX
from libs.serving.requests.auditing import Auditor
from libs.serving.requests.doors import ClientDoor
from slatemq._tokens import new_token
from slatemq.cli.access.dev_certificates import Authority
from slatemq.errors import (
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    SlateMQError,
    Unauthenticated,
)
from slatemq.v1 import (
    assignment_pb2,
    consumer_pb2,
    entry_pb2,
    ingest_pb2,
    janitor_pb2,
    queue_pb2,
    topology_pb2,
)

pytestmark = pytest.mark.usefixtures("cheap_hashes")

POLICY = """
roles:
  worker:
    - {verbs: [consume, inspect], queues: ["orders*"]}
  operator:
    - verbs: [operate]
bindings:
  - principals: [worker, certified]
    roles: [worker]
certificates: ["cert*"]
"""
CLAIM_METHOD = "/slatemq.v1.ConsumerService/Claim"
CLAIM = access_of(CLAIM_METHOD)
ACK = access_of("/slatemq.v1.ConsumerService/Ack")
PURGE = access_of("/slatemq.v1.QueueService/PurgeQueue")
LIST = access_of("/slatemq.v1.QueueService/ListQueues")
ASSIGNMENT = assignment_pb2.DESCRIPTOR.services_by_name["AssignmentService"]
ASSIGN = f"/{ASSIGNMENT.full_name}/Assign"
TOPOLOGY = access_of("/slatemq.v1.TopologyService/GetTopology")
CHECK = "/grpc.health.v1.Health/Check"
FIND = "EntryService/FindMessage"
SETTLE = "DeadLetterService/SettleDeadLetters"


class Rig:
    """A policy, and tokens of `worker` and `stranger`."""

    def __init__(self, folder: Path) -> None:
        self.policy = folder / "policy.yaml"
        self.policy.write_text(POLICY)
        tokens = folder / "tokens.yaml"
        self.now_s = time.time()
        expires = datetime.fromtimestamp(self.now_s, UTC) + timedelta(hours=1)
        made = {name: new_token(name, expires=expires) for name in ("worker", "stranger")}
        tokens.write_text(yaml.safe_dump({"tokens": [one.entry for one in made.values()]}))
        self.worker = f"Bearer {made['worker'].token}"
        self.stranger = f"Bearer {made['stranger'].token}"
        self.file = ReloadedFile.of_document(self.policy, Policy)
        token_file = ReloadedFile.of_document(tokens, TokenFile)
        self.callers = Callers(self.file, token_file, clock_s=lambda: self.now_s)

    def change(self, before: str, after: str) -> None:
        """Put a part of POLICY in another way, and load that."""
        self.policy.write_text(POLICY.replace(before, after))
        assert self.file.reload()

    async def find(self, authorization: str, certified: Collection[str] = ()) -> Caller:
        return (await self.callers.identify(authorization, certified)).caller


def auditor(publish: Callable[[Act], None] = lambda act: None) -> Auditor:
    return Auditor("broker-0", publish)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


COSTLY = """
roles:
  publisher:
    - {verbs: [publish], when: 'headers.all(k, k in ["queue", "tenant", "n"])'}
bindings:
  - principals: [worker]
    roles: [publisher]
limits:
  - {principals: [worker], publish_bytes_per_s: 1}
"""


def distinct(count: int) -> list[tuple[int, dict[str, str], int, int]]:
    """Runs of one message and ten bytes each, none of which is like another."""
    return [(n, {"queue": "orders", "n": str(n)}, 1, 10) for n in range(count)]


async def test_others_have_turns_while_costly_conditions_are_judged(rig: Rig) -> None:
    rig.change(POLICY, COSTLY)
    worker = await rig.find(rig.worker)
    judging = asyncio.create_task(worker.publish(distinct(2_000)))

    turns = 0
    while not judging.done():
        await asyncio.sleep(0)
        turns += 1
    await judging
    assert turns >= 10


async def test_a_publish_that_ends_while_it_is_judged_counts_with_all_its_bytes(rig: Rig) -> None:
    rig.change(POLICY, COSTLY)
    worker = await rig.find(rig.worker)
    judging = asyncio.create_task(worker.publish(distinct(2_000)))
    await asyncio.sleep(0)
    judging.cancel()
    await asyncio.wait([judging])

    assert judging.cancelled()
    with pytest.raises(ResourceExhausted, match="publish_bytes_per_s"):
        worker.quota.admit_publish()


async def test_a_call_is_judged_by_the_queue_that_it_names(rig: Rig) -> None:
    worker = await rig.find(rig.worker)

    worker.check(CLAIM, consumer_pb2.ClaimRequest(queue_id="orders-eu"))
    worker.check(ACK, consumer_pb2.AckRequest(lease_tokens=["1"]))
    worker.check(LIST, queue_pb2.ListQueuesRequest())
    with pytest.raises(PermissionDenied) as caught:
        worker.check(CLAIM, consumer_pb2.ClaimRequest(queue_id="bills"))
    assert caught.value.metadata == {"verb": "consume", "queue": "bills"}
    with pytest.raises(PermissionDenied):
        worker.check(PURGE, queue_pb2.PurgeQueueRequest(queue_id="orders"))


async def test_a_request_that_names_too_many_queues_is_refused_before_they_are_judged(
    rig: Rig,
) -> None:
    worker = await rig.find(rig.worker)
    find, settle = (access_of(f"/slatemq.v1.{method}") for method in (FIND, SETTLE))
    settlement = entry_pb2.DeadLetterSettlement(handle="bills/1/f0")
    settlements = entry_pb2.SettleDeadLettersRequest(settlements=[settlement] * (NAMED_MAX + 1))

    worker.check(find, entry_pb2.FindMessageRequest(queue_ids=["orders"] * NAMED_MAX))
    for method, request, field in (
        (find, entry_pb2.FindMessageRequest(queue_ids=["orders"] * (NAMED_MAX + 1)), "queue_ids"),
        (settle, settlements, "settlements"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            worker.check(method, request)
        assert (caught.value.field, caught.value.reason) == (field, "TOO_MANY_ITEMS")


async def test_a_stored_message_is_for_editors_of_its_own_queue(rig: Rig) -> None:
    rig.change("[consume, inspect]", "[consume, edit]")
    worker = await rig.find(rig.worker)

    worker.require_edit({"queue": "orders"}, "")
    worker.require_edit({"queue": "bills"}, "orders")  # It was pushed there, and nowhere else.
    for headers, pushed_to in (
        ({"queue": "bills"}, ""),
        ({"queue": "orders"}, "bills"),
        ({}, ""),
        ({"queue": "orders", TASKS_HEADER: "1"}, ""),
        ({TASKS_HEADER: "1"}, "orders"),
    ):
        with pytest.raises(PermissionDenied):
            worker.require_edit(headers, pushed_to)


async def test_no_client_makes_a_call_of_services(rig: Rig) -> None:
    rig.policy.write_text(
        "roles: {all: [{verbs: [publish, consume, inspect, edit, administer, operate]}]}\n"
        "bindings: [{principals: ['*'], roles: [all]}]\n"
    )
    assert rig.file.reload()

    for authorization in ("", rig.worker, rig.stranger):
        caller = await rig.find(authorization, ["certified"])
        caller.check(PURGE, queue_pb2.PurgeQueueRequest(queue_id="orders"))
    for callers in (None, rig.callers):
        for authorization in ("", rig.worker, rig.stranger):
            judge = ClientDoor(callers, auditor()).judge_of(ASSIGN)
            assert judge is not None
            with pytest.raises(PermissionDenied, match="only services"):
                await judge.enter(call_with(authorization))


def call_with(authorization: str, tls: bytes = b"TLSv1.3", certificate: bytes = b"") -> Any:
    """The context of a call with this header, on a connection with this certificate in PEM."""
    callbacks: list[Callable[[Any], None]] = []
    call = SimpleNamespace(
        invocation_metadata=lambda: [("authorization", authorization)],
        auth_context=lambda: {"ssl_tls_version": [tls], "x509_pem_cert": [certificate]},
        add_done_callback=callbacks.append,
        peer=lambda: "ipv4:127.0.0.1:1",
        code=lambda: 0,
        time_remaining=lambda: None,
    )
    call.end = lambda: [ended(call) for ended in callbacks]
    return call


EACH_KIND: Final = (
    ("IngestService/Publish", ingest_pb2.PublishRequest()),
    ("IngestService/PublishStream", ingest_pb2.PublishStreamRequest()),
    ("ConsumerService/Claim", consumer_pb2.ClaimRequest(queue_id="orders")),
    ("ConsumerService/Consume", consumer_pb2.ConsumeRequest()),
    ("QueueService/GetQueue", queue_pb2.GetQueueRequest(queue_id="orders")),
    ("QueueService/PurgeQueue", queue_pb2.PurgeQueueRequest(queue_id="orders")),
    ("TopologyService/GetTopology", topology_pb2.GetTopologyRequest()),
    ("JanitorService/ListRuns", janitor_pb2.ListRunsRequest()),
)
"""Calls of each verb, of each form, and of who proves who it is."""


@pytest.mark.parametrize("method", [method for method, _ in EACH_KIND])
async def test_a_proof_that_is_refused_is_recorded_whatever_the_call(rig: Rig, method: str) -> None:
    acts: list[Act] = []
    judge = ClientDoor(rig.callers, auditor(acts.append)).judge_of(f"/slatemq.v1.{method}")
    assert judge is not None

    for number in range(100):
        call = call_with(f"Bearer forged-{number}")
        with pytest.raises(Unauthenticated):
            await judge.enter(call)
        call.end()

    assert [(one.principal, one.act, one.outcome) for one in acts] == [
        ("", f"/slatemq.v1.{method}", "UNAUTHENTICATED")
    ] * REPEATS_MAX


async def test_a_caller_without_a_proof_is_recorded_by_what_it_tried(rig: Rig) -> None:
    acts: list[Act] = []
    door = ClientDoor(rig.callers, auditor(acts.append))
    for method, _ in EACH_KIND:
        judge = door.judge_of(f"/slatemq.v1.{method}")
        assert judge is not None
        call = call_with("")
        with pytest.raises(Unauthenticated, match="needs a token or a client certificate"):
            await judge.enter(call)
        call.end()

    assert [(one.principal, one.act.rpartition("/")[2], one.outcome) for one in acts] == [
        ("anonymous", "PurgeQueue", "UNAUTHENTICATED"),
        ("anonymous", "ListRuns", "UNAUTHENTICATED"),
    ]


@pytest.mark.parametrize(("method", "request_"), EACH_KIND)
async def test_a_proof_that_ends_during_a_call_is_recorded_once(
    rig: Rig, method: str, request_: Any
) -> None:
    rig.policy.write_text(
        "roles: {all: [{verbs: [publish, consume, inspect, edit, administer, operate]}]}\n"
        "bindings: [{principals: ['*'], roles: [all]}]\n"
    )
    assert rig.file.reload()
    acts: list[Act] = []
    judge = ClientDoor(rig.callers, auditor(acts.append)).judge_of(f"/slatemq.v1.{method}")
    assert judge is not None
    for has_request in (False, True):
        rig.now_s = time.time()
        call = call_with(rig.worker)
        with await judge.enter(call) as visit:
            if has_request:
                await visit.judge(request_)

            rig.now_s += 3601

            with pytest.raises(Unauthenticated):
                await visit.judge(request_)
        call.code = lambda: 16
        call.end()

    facts = [(one.principal, one.outcome) for one in acts]
    assert facts == [("worker", "UNAUTHENTICATED")] * 2


async def test_a_caller_without_a_proof_is_asked_for_one_and_a_wrong_proof_is_refused(
    rig: Rig,
) -> None:
    async def outcome(authorization: str) -> type[SlateMQError] | None:
        try:
            caller = await rig.find(authorization)
            caller.check(CLAIM, consumer_pb2.ClaimRequest(queue_id="orders"))
        except SlateMQError as error:
            return type(error)
        return None

    assert await outcome(rig.worker) is None
    assert await outcome(rig.stranger) is PermissionDenied
    assert await outcome("") is Unauthenticated
    assert await outcome("Bearer x") is Unauthenticated


async def test_the_topology_needs_a_proof_and_health_needs_nothing(rig: Rig) -> None:
    anonymous = await rig.find("")
    stranger = await rig.find(rig.stranger)

    assert ClientDoor(rig.callers, auditor()).judge_of(CHECK) is None
    stranger.check(TOPOLOGY, topology_pb2.GetTopologyRequest())
    with pytest.raises(Unauthenticated):
        anonymous.check(TOPOLOGY, topology_pb2.GetTopologyRequest())


async def test_who_may_do_something_without_a_proof_may_ask_where_the_processes_are(
    rig: Rig,
) -> None:
    anonymous = await rig.find("")

    rig.change("certified]", "anonymous]")
    anonymous.check(CLAIM, consumer_pb2.ClaimRequest(queue_id="orders"))
    anonymous.check(TOPOLOGY, topology_pb2.GetTopologyRequest())

    rig.change("certificates:", "certificates:  #")
    with pytest.raises(Unauthenticated):
        anonymous.check(TOPOLOGY, topology_pb2.GetTopologyRequest())


async def test_a_client_certificate_proves_one_of_its_names(rig: Rig) -> None:
    certified = await rig.find("", ["other", "certified"])
    certified.check(CLAIM, consumer_pb2.ClaimRequest(queue_id="orders"))

    assert certified.principal.method == "certificate"
    other = await rig.find("", ["other"])
    assert other.principal.name == "anonymous"
    with pytest.raises(Unauthenticated):
        await rig.find("Bearer bad", ["certified"])


async def test_callers_by_certificate_are_kept_within_bounds(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers_module, "KEPT_MAX", 3)
    first = await rig.find("", ["cert-0"])

    for number in range(1, 5):
        await rig.find("", [f"cert-{number}"])
        assert await rig.find("", ["cert-0"]) is first  # It comes again and again.

    assert len(rig.callers._certified) == 3
    assert (await rig.find("", ["cert-1"])).principal.name == "cert-1"


async def test_a_principal_keeps_its_limit_for_as_long_as_one_of_its_callers_is_known(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers_module, "KEPT_MAX", 2)
    worker = await rig.find(rig.worker)

    # Given others, for whom idle quotas are forgotten
    for number in range(5):
        rig.callers._caller(Principal(f"other-{number}", "jwt"))

    # Then another token of the principal is held to what this one takes
    again = rig.callers._caller(Principal("worker", "jwt"))
    assert again.quota is worker.quota
    assert len(rig.callers._quotas) <= 4  # Of whom callers are known, and the last.


async def test_quotas_that_stay_cost_new_ones_few_passes_over_them(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers_module, "KEPT_MAX", 3)
    passes = 0
    forget_idle = rig.callers._forget_idle

    def counted() -> None:
        nonlocal passes
        passes += 1
        forget_idle()

    monkeypatch.setattr(rig.callers, "_forget_idle", counted)
    # Given more callers that are known than idle quotas are kept
    known = [rig.callers._caller(Principal(f"known-{number}", "jwt")) for number in range(4)]

    for number in range(100):
        rig.callers._caller(Principal(f"other-{number}", "jwt"))

    assert 0 < passes <= 25  # Each for as many new ones as stay, at least.
    assert len(rig.callers._quotas) <= 3 * len(known)
    for caller in known:
        assert rig.callers._caller(caller.principal).quota is caller.quota


async def test_a_new_policy_holds_for_callers_that_are_known(rig: Rig) -> None:
    before = await rig.find(rig.worker)

    rig.policy.write_text(POLICY.replace('"orders*"', '"bills"'))
    assert rig.file.reload()

    after = await rig.find(rig.worker)
    assert after is before
    after.check(CLAIM, consumer_pb2.ClaimRequest(queue_id="bills"))
    with pytest.raises(PermissionDenied):
        after.check(CLAIM, consumer_pb2.ClaimRequest(queue_id="orders"))


CONSUME_START = consumer_pb2.ConsumeStart(queue_id="orders")


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("ConsumerService/Consume", consumer_pb2.ConsumeRequest(start=CONSUME_START)),
        ("ConsumerService/Claim", consumer_pb2.ClaimRequest(queue_id="orders")),
        ("EntryService/FindMessage", entry_pb2.FindMessageRequest(queue_ids=["orders"])),
        ("EntryService/FindMessage", entry_pb2.FindMessageRequest()),
        ("DelayedService/WatchDelayed", entry_pb2.WatchDelayedRequest(queue_id="orders")),
        ("QueueService/WatchQueues", queue_pb2.WatchQueuesRequest()),
        ("JanitorService/ReadArchived", janitor_pb2.ReadArchivedRequest(queue_id="orders")),
        ("JanitorService/WatchRun", janitor_pb2.WatchRunRequest()),
    ],
)
async def test_a_stream_or_a_claim_gets_no_response_once_the_policy_forbids_it(
    rig: Rig, method: str, request_: Any
) -> None:
    operating = "    roles: [worker, operator]"
    rig.change("    roles: [worker]", operating)
    judge = ClientDoor(rig.callers, auditor()).judge_of(f"/slatemq.v1.{method}")
    assert judge is not None
    with await judge.enter(call_with(rig.worker)) as visit:
        await visit.judge(request_)

        # When the policy changes to one that permits the stream, too, and then to one that does not
        rig.change("    roles: [worker]", f"{operating} # Again")
        await visit.renew()
        rig.change("[consume, inspect]", "[publish]")

        with pytest.raises(PermissionDenied):
            await visit.renew()


async def test_a_stream_that_sends_heartbeats_is_judged_by_its_first_request(rig: Rig) -> None:
    door = ClientDoor(rig.callers, auditor())
    judge = door.judge_of("/slatemq.v1.ConsumerService/Consume")
    assert judge is not None
    with await judge.enter(call_with(rig.worker)) as visit:
        await visit.judge(consumer_pb2.ConsumeRequest(start=CONSUME_START))
        rig.change('"orders*"', '"bills"')

        with pytest.raises(PermissionDenied, match="'orders'"):
            await visit.judge(
                consumer_pb2.ConsumeRequest(heartbeat=consumer_pb2.ConsumeHeartbeat())
            )


async def test_a_call_by_old_tls_is_refused_with_a_token_that_is_known(rig: Rig) -> None:
    judge = ClientDoor(rig.callers, auditor()).judge_of(CLAIM_METHOD)
    assert judge is not None
    with await judge.enter(call_with(rig.worker)) as visit:
        await visit.judge(consumer_pb2.ClaimRequest(queue_id="orders"))

    with pytest.raises(Unauthenticated, match="connect with TLS"):
        await judge.enter(call_with(rig.worker, b"TLSv1.2"))


async def test_a_call_by_old_tls_is_refused_where_no_policy_asks_who_calls() -> None:
    door = ClientDoor(None, auditor(), has_tls=True)
    judge = door.judge_of(CLAIM_METHOD)
    assert judge is not None
    with await judge.enter(call_with("")) as visit:
        await visit.judge(consumer_pb2.ClaimRequest(queue_id="orders"))

    with pytest.raises(Unauthenticated, match="connect with TLS"):
        await judge.enter(call_with("", b"TLSv1.2"))


@pytest.mark.parametrize("has_policy", [True, False])
async def test_a_certificate_that_expires_ends_calls_and_streams_of_open_connections(
    rig: Rig, *, has_policy: bool
) -> None:
    certificate, _ = Authority(days=1).sign("someone", ["someone"])
    callers = rig.callers if has_policy else None
    door = ClientDoor(callers, auditor(), has_tls=True, clock_s=lambda: rig.now_s)
    judge = door.judge_of("/slatemq.v1.QueueService/WatchQueues")
    assert judge is not None
    call = call_with(rig.worker, certificate=certificate)
    with await judge.enter(call) as visit:
        await visit.judge(queue_pb2.WatchQueuesRequest())
        await visit.renew()

        rig.now_s += timedelta(days=2).total_seconds()

        for refused in (visit.renew(), visit.judge(queue_pb2.WatchQueuesRequest())):
            with pytest.raises(Unauthenticated) as caught:
                await refused
            assert caught.value.reason == "CERTIFICATE_EXPIRED"
    with pytest.raises(Unauthenticated) as caught:
        await judge.enter(call)
    assert caught.value.reason == "CERTIFICATE_EXPIRED"


async def test_a_name_that_the_policy_takes_from_certificates_ends_in_calls_too(rig: Rig) -> None:
    identity = await rig.callers.identify("", ["certified"])
    assert identity.caller.principal.name == "certified"
    assert not await identity.renew()

    rig.policy.write_text(POLICY.replace("cert*", "other"))
    assert rig.file.reload()

    assert await identity.renew()
    assert identity.caller.principal.name == "anonymous"


async def test_a_call_is_as_long_as_its_token(rig: Rig) -> None:
    identity = await rig.callers.identify(rig.worker)
    assert not await identity.renew()

    rig.now_s += 3601

    with pytest.raises(Unauthenticated, match="expired"):
        await identity.renew()


SILENT: Final = (
    ("ConsumerService/Consume", consumer_pb2.ConsumeRequest(start=CONSUME_START)),
    ("ConsumerService/Claim", consumer_pb2.ClaimRequest(queue_id="orders")),
    ("QueueService/WatchQueues", queue_pb2.WatchQueuesRequest()),
)


async def nothing() -> None:
    """What happens while a call is let in."""


async def served(
    door: ClientDoor,
    method: str,
    request: Any,
    call: Any,
    meanwhile: Callable[[], Awaitable[None]] = nothing,
) -> None:
    """Serve a call whose handler has nothing to send."""
    judge = door.judge_of(f"/slatemq.v1.{method}")
    assert judge is not None

    async def responses() -> AsyncGenerator[None, None]:
        await asyncio.Event().wait()
        yield

    with await judge.enter(call) as visit:
        await visit.judge(request)
        await meanwhile()
        if method.endswith("/Claim"):
            await asyncio.Event().wait()
        async with aclosing(responses()) as silent:
            visit.follow(silent)
            await anext(silent)


async def opened(rig: Rig, door: ClientDoor, method: str, request: Any) -> asyncio.Task[None]:
    await (await rig.callers.identify(rig.worker)).renew()  # Its token is known from here on.
    task = asyncio.create_task(served(door, method, request, call_with(rig.worker)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done()
    return task


@pytest.mark.parametrize(("method", "request_"), SILENT)
async def test_a_silent_call_ends_when_its_token_does(rig: Rig, method: str, request_: Any) -> None:
    door = ClientDoor(rig.callers, auditor(), clock_s=lambda: rig.now_s)
    task = await opened(rig, door, method, request_)
    rig.now_s += 3599
    await door.open_calls.look()
    await asyncio.sleep(0)
    assert not task.done()

    rig.now_s += 2
    await door.open_calls.look()

    with pytest.raises(Unauthenticated, match="expired"):
        await task


@pytest.mark.parametrize(("method", "request_"), SILENT)
async def test_a_silent_call_ends_when_the_policy_forbids_it(
    rig: Rig, method: str, request_: Any
) -> None:
    door = ClientDoor(rig.callers, auditor(), clock_s=lambda: rig.now_s)
    task = await opened(rig, door, method, request_)
    rig.change('"orders*"', '"orders", "bills"')
    await door.open_calls.look()
    await asyncio.sleep(0)
    assert not task.done()

    rig.change("[consume, inspect]", "[publish]")
    await door.open_calls.look()

    with pytest.raises(PermissionDenied):
        await task


@pytest.mark.parametrize(("method", "request_"), SILENT)
async def test_a_change_is_not_lost_that_comes_while_a_call_is_let_in(
    rig: Rig, method: str, request_: Any
) -> None:
    door = ClientDoor(rig.callers, auditor(), clock_s=lambda: rig.now_s)

    async def forbid() -> None:
        rig.change("[consume, inspect]", "[publish]")
        await door.open_calls.look()

    call = call_with(rig.worker)
    task = asyncio.create_task(served(door, method, request_, call, forbid))
    while rig.file.version == 1:
        await asyncio.sleep(0.01)
    await asyncio.wait([task], timeout=0)

    await door.open_calls.look()

    with pytest.raises(PermissionDenied):
        await task


@pytest.mark.parametrize("has_policy", [True, False])
async def test_a_stream_of_publishes_has_its_answers_and_ends_at_its_next_request(
    rig: Rig, *, has_policy: bool
) -> None:
    rig.change("[consume, inspect]", "[publish]")
    certificate, _ = Authority(days=1).sign("someone", ["someone"])
    callers = rig.callers if has_policy else None
    door = ClientDoor(callers, auditor(), has_tls=True, clock_s=lambda: rig.now_s)
    judge = door.judge_of("/slatemq.v1.IngestService/PublishStream")
    assert judge is not None
    request = ingest_pb2.PublishStreamRequest()

    async def answers() -> AsyncGenerator[None, None]:
        yield

    with await judge.enter(call_with(rig.worker, certificate=certificate)) as visit:
        await visit.judge(request)
        visit.follow(answers())
        rig.now_s += timedelta(days=2).total_seconds()

        for _ in range(2):
            await door.open_calls.look()
            await asyncio.sleep(0)
        await visit.renew()

        with pytest.raises(Unauthenticated):
            await visit.judge(request)
