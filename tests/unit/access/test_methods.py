"""Each RPC says who may call it, and its queues are found in its requests."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message_factory import GetMessageClass

from libs.access.audit import SUBJECTS_MAX, subjects_of
from libs.access.methods import access_of
from slatemq.v1 import (
    archived_pb2,
    assignment_pb2,
    consumer_pb2,
    entry_pb2,
    ingest_pb2,
    instance_pb2,
    janitor_pb2,
    outbox_pb2,
    queue_pb2,
    removal_pb2,
    router_pb2,
)

PROTOS = Path(__file__).resolve().parents[3] / "protos"


def rpcs() -> list[MethodDescriptor]:
    found: list[MethodDescriptor] = []
    for path in sorted((PROTOS / "slatemq").rglob("*.proto")):
        name = str(path.relative_to(PROTOS))
        import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2")
        file = descriptor_pool.Default().FindFileByName(name)
        for service in file.services_by_name.values():
            found += service.methods
    return sorted(found, key=lambda rpc: rpc.full_name)


@pytest.mark.parametrize("rpc", rpcs(), ids=lambda rpc: rpc.full_name)
def test_an_rpc_says_who_may_call_it(rpc: MethodDescriptor) -> None:
    access = access_of(_path(rpc))

    assert list(access.queues(GetMessageClass(rpc.input_type)())) in ([], [""], ["", ""])


def test_calls_that_wait_say_so() -> None:
    waiting = {rpc.name for rpc in rpcs() if access_of(_path(rpc)).waits}
    asking = {rpc.name for rpc in rpcs() if "wait_ms" in rpc.input_type.fields_by_name}

    assert waiting == asking | {"WaitTask"}
    assert not any(rpc.server_streaming for rpc in rpcs() if rpc.name in waiting)


def test_of_the_calls_of_publishers_those_that_publish_say_so() -> None:
    accesses = {rpc.name: access_of(_path(rpc)) for rpc in rpcs()}

    publishing = {name for name, access in accesses.items() if access.publishes}
    assert publishing == {"Publish", "PublishStream"}
    assert all(accesses[name].caller == "publish" for name in publishing)


def test_of_many_settlements_an_act_says_how_many_are_of_each_kind() -> None:
    drops = [entry_pb2.DeadLetterSettlement(handle=f"a/{number}/f0") for number in range(980)]
    for one in drops:
        one.drop.SetInParent()
    redrives = [entry_pb2.DeadLetterSettlement(handle=f"a/{number}/f1") for number in range(20)]
    for one in redrives:
        one.redrive.SetInParent()
    request = entry_pb2.SettleDeadLettersRequest(settlements=[*redrives, *drops])

    settle = access_of("/slatemq.v1.DeadLetterService/SettleDeadLetters")
    details = subjects_of(settle.details(request))

    assert details[:3] == ("redrive=20", "drop=980", "settlements.handle=a/0/f1")
    assert len(details) == SUBJECTS_MAX


def _path(rpc: MethodDescriptor) -> str:
    return f"/{rpc.containing_service.full_name}/{rpc.name}"


def test_a_request_gives_its_queues() -> None:
    settlements = [entry_pb2.DeadLetterSettlement(handle=handle) for handle in ("a/1/f0", "b/2")]
    start = consumer_pb2.ConsumeStart(queue_id="q")
    heartbeat = consumer_pb2.ConsumeHeartbeat()
    cases = [
        ("ConsumerService/Claim", consumer_pb2.ClaimRequest(queue_id="q"), ["q"]),
        (
            "QueueService/CreateQueue",
            queue_pb2.CreateQueueRequest(queue=queue_pb2.Queue(queue_id="q")),
            ["q"],
        ),
        ("QueueService/CreateQueue", queue_pb2.CreateQueueRequest(), []),
        ("ConsumerService/Consume", consumer_pb2.ConsumeRequest(start=start), ["q"]),
        ("ConsumerService/Consume", consumer_pb2.ConsumeRequest(heartbeat=heartbeat), []),
        ("RouterService/Explain", router_pb2.ExplainRequest(queue_ids=["a", "b"]), ["a", "b"]),
    ]
    for method, request, queues in cases:
        assert list(access_of(f"/slatemq.v1.{method}").queues(request)) == queues
    service = entry_pb2.DESCRIPTOR.services_by_name["DeadLetterService"].full_name
    settle = access_of(f"/{service}/SettleDeadLetters")
    request = entry_pb2.SettleDeadLettersRequest(settlements=settlements)
    assert list(settle.queues(request)) == ["a", "b"]


def test_the_audit_says_which_archived_messages_a_request_is_about() -> None:
    dropped = [removal_pb2.FailedRow(message_id=number) for number in (7, 8)]
    redriven = [archived_pb2.ArchivedRow(message_id=7, payload=b"secret", headers={"k": "secret"})]
    run = janitor_pb2.RunJobRequest(job="restore", message_ids=[7, 8], failed_from_ms=5)
    cases = {
        "ArchivedService/DropArchived": (
            archived_pb2.DropArchivedRequest(queue_id="a", rows=dropped),
            ["rows=2", "rows.message_id=7", "rows.message_id=8"],
        ),
        "ArchivedService/RedriveArchived": (
            archived_pb2.RedriveArchivedRequest(queue_id="a", rows=redriven),
            ["rows=1", "rows.message_id=7"],
        ),
        "JanitorService/RunJob": (
            run,
            [
                "message_ids=2",
                "job=restore",
                "dry_run=false",
                "failed_from_ms=5",
                "failed_until_ms=0",
                "message_ids=7",
                "message_ids=8",
            ],
        ),
    }
    for method, (request, details) in cases.items():
        assert list(access_of(f"/slatemq.v1.{method}").details(request)) == details


def test_a_request_gives_what_the_audit_says_of_it() -> None:
    settings = instance_pb2.InstanceSettings(retention_s=0, purge_grace_s=60)
    edit = entry_pb2.EditMessageRequest(handle="a/1/d0", payload=b"secret", headers={"k": "secret"})
    settlements = [entry_pb2.DeadLetterSettlement(handle=handle) for handle in ("a/1/f0", "a/2")]
    settlements[0].drop.SetInParent()
    redrive = entry_pb2.StartRedriveRequest(
        queue_id="a", filter="reason == 'x'", rate=5, message_ids=[7, 8]
    )
    purge = queue_pb2.PurgeQueueRequest(queue_id="a", states=[queue_pb2.ENTRY_STATE_AVAILABLE])
    purge.MergeFromString(b"\x10\x63")  # And a state that is not known
    update = queue_pb2.UpdateQueueRequest(update_mask=FieldMask(paths=["filter", "lease_ms"]))
    cases = [
        ("DelayedService/EditMessage", edit, ["handle=a/1/d0"]),
        (
            "DeadLetterService/SettleDeadLetters",
            entry_pb2.SettleDeadLettersRequest(settlements=settlements),
            ["drop=1", "no_action=1", "settlements.handle=a/1/f0", "settlements.handle=a/2"],
        ),
        (
            "DeadLetterService/StartRedrive",
            redrive,
            ["message_ids=2", "filter=reason == 'x'", "rate=5"],
        ),
        (
            "DeadLetterService/StartRedrive",
            entry_pb2.StartRedriveRequest(queue_id="a"),
            ["rate=0"],
        ),
        ("QueueService/PurgeQueue", purge, ["states=ENTRY_STATE_AVAILABLE", "states=99"]),
        (
            "QueueService/UpdateQueue",
            update,
            ["update_mask.paths=filter", "update_mask.paths=lease_ms"],
        ),
        ("JanitorService/CancelRun", janitor_pb2.CancelRunRequest(run_id="r"), ["run_id=r"]),
        ("JanitorService/CancelRun", janitor_pb2.CancelRunRequest(), []),
        ("OutboxService/ResumeOutbox", outbox_pb2.ResumeOutboxRequest(), ["ingest_shard=0"]),
        (
            "InstanceService/UpdateInstance",
            instance_pb2.UpdateInstanceRequest(settings=settings, accept_loss=True),
            ["settings.retention_s=0", "settings.purge_grace_s=60", "accept_loss=true"],
        ),
    ]
    for method, request, details in cases:
        assert list(access_of(f"/slatemq.v1.{method}").details(request)) == details
    run = janitor_pb2.RunJobRequest(queue_ids=["a"], target_queue_id="b")
    assert list(access_of("/slatemq.v1.JanitorService/RunJob").queues(run)) == ["a", "b"]


@pytest.mark.parametrize(
    ("method", "caller"),
    [
        (f"{assignment_pb2.DESCRIPTOR.package}.AssignmentService/Assign", "service"),
        (f"{ingest_pb2.DESCRIPTOR.package}.IngestService/Publish", "publish"),
        ("slatemq.v1.TopologyService/GetTopology", "authenticated"),
        ("grpc.health.v1.Health/Check", "anyone"),
        ("grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "authenticated"),
    ],
)
def test_what_an_rpc_asks(method: str, caller: str) -> None:
    assert access_of(f"/{method}").caller == caller


@pytest.mark.parametrize("method", ["/slatemq.v1.QueueService/Absent", "/other/X", "", "/"])
def test_a_method_that_is_not_there_has_no_access(method: str) -> None:
    with pytest.raises(LookupError):
        access_of(method)
