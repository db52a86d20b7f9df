"""`slatemq doctor`: each thing that can be wrong is found, named, and comes with advice."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from libs.storage.database.settings import Kind, tuning_of
from slatemq._admin.examining import Caller, CertificateExpiry, Examination
from slatemq._admin.instance import Status
from slatemq._admin.queue_models import queue_of
from slatemq.cli.monitor.findings import (
    DAY_MS,
    TABLES_SHARE_MAX,
    Answers,
    Finding,
    Level,
    findings_of,
    is_well,
)
from slatemq.models import RouteStatus, ServiceStatus
from slatemq.v1 import queue_pb2

NOW_MS = 1_767_225_600_000
KINDS = ("ingest", "router", "broker", "janitor")
VERBS = ("publish", "consume", "inspect", "edit", "administer", "operate")
GIB = 1 << 30


def examination(kind: str, **values: Any) -> Examination:
    usual: dict[str, Any] = {
        "service": kind,
        "version": "0.1.0",
        "store_test_ms": 5,
        "store_clock_ahead_ms": 700,
        "disk_free_bytes": 50 * GIB,
        "disk_size_bytes": 100 * GIB,
        "uncompacted_tables": 2,
        "uncompacted_tables_max": 32,
        "certificates": (CertificateExpiry("cert.pem", "CN=x", NOW_MS + 90 * DAY_MS),),
    }
    return Examination((kind, 0), "127.0.0.1:1", **{**usual, **values})


def answers(**values: Any) -> Answers:
    services = [ServiceStatus(kind, 0, "127.0.0.1:1", True, "", 3) for kind in KINDS]
    return replace(
        Answers(
            Status(services, [RouteStatus(0, 0, 420, 420, 0)], [], [], 3),
            Caller("ops", VERBS),
            [examination(kind) for kind in KINDS],
            [],
            "0.1.0",
            NOW_MS,
        ),
        **values,
    )


def of_broker(**values: Any) -> Answers:
    return answers(
        examined=[examination(kind, **(values if kind == "broker" else {})) for kind in KINDS]
    )


def of_ingest(**values: Any) -> Answers:
    return answers(
        examined=[examination(kind, **(values if kind == "ingest" else {})) for kind in KINDS]
    )


def with_status(**values: Any) -> Answers:
    return answers(status=replace(answers().status, **values))


def bad(given: Answers) -> list[Finding]:
    return [one for one in findings_of(given) if one.level is not Level.OK]


def test_of_what_is_well_each_check_says_so_in_one_line() -> None:
    found = findings_of(answers())

    assert {one.level for one in found} == {Level.OK}
    assert len({one.check for one in found}) == len(found) == 12
    assert not any(one.advice for one in found)
    assert is_well(found)


def test_versions_are_made_alike_in_any_order_as_upgrades_are_tested() -> None:
    (found,) = bad(of_broker(version="0.2.0"))

    assert found.advice.endswith(", in any order")
    assert not any(kind in found.advice for kind in KINDS)


def test_queues_that_a_broker_did_not_list_are_not_said_to_be_well() -> None:
    found = findings_of(with_status(unlisted_brokers=[0]))

    assert "queues" not in {one.check for one in found if one.level is Level.OK}


def broken(name: str, **values: Any) -> list[ServiceStatus]:
    return [
        replace(one, **values) if one.service == name else one for one in answers().status.services
    ]


QUARANTINED = queue_pb2.Queue(queue_id="slow", filter="true")
QUARANTINED.quarantine.reason = "its filter took 3 s"

CASES = {
    "down": (
        with_status(services=broken("broker", serving=False, detail="waits for the store")),
        ("processes", Level.PROBLEM, "waits for the store"),
    ),
    "serving with a file that is refused": (
        with_status(services=broken("broker", detail="'service.key' is refused as it is now")),
        ("processes", Level.WARNING, "broker 0 at 127.0.0.1:1 serves, but 'service.key' is ref"),
    ),
    "no router": (
        with_status(services=[one for one in answers().status.services if one.service != "router"]),
        ("processes", Level.PROBLEM, "there is no router: nothing is routed"),
    ),
    "no janitor": (
        with_status(services=answers().status.services[:3]),
        ("processes", Level.WARNING, "there is no janitor"),
    ),
    "no right to look": (
        answers(caller=Caller("shop", ["publish", "inspect"]), examined=[]),
        ("permissions", Level.WARNING, "'shop' may not operate"),
    ),
    "older settings": (
        with_status(services=broken("ingest", instance_number=2)),
        ("settings", Level.WARNING, "ingest 0 runs with instance record 2, not 3"),
    ),
    "settings that no process can read": (
        with_status(instance_number=0, settings_problem="corrupt instance record: it was removed"),
        ("settings", Level.PROBLEM, "no process can read the instance record: corrupt"),
    ),
    "open": (
        with_status(services=broken("ingest", open_without=("TLS", "policy"))),
        ("settings", Level.PROBLEM, "without TLS and policy"),
    ),
    "another version": (
        of_broker(version="0.2.0"),
        ("versions", Level.WARNING, "0.2.0: broker 0"),
    ),
    "another process at the address": (
        of_broker(service="ingest", shard=4),
        ("topology", Level.PROBLEM, "as broker 0, where ingest 4 answers"),
    ),
    "no answer": (
        of_broker(problem="deadline exceeded"),
        ("topology", Level.PROBLEM, "broker 0 at 127.0.0.1:1 did not answer"),
    ),
    "queues not listed": (
        with_status(unlisted_brokers=[7]),
        ("topology", Level.PROBLEM, "broker 7 did not list its queues"),
    ),
    "a log that ends before a cursor": (
        of_ingest(durable_sequence=419),
        ("routes", Level.PROBLEM, "ingest 0 to broker 0 is routed to 420, and the log ends at 419"),
    ),
    "a log whose end is unknown": (
        with_status(routes=[RouteStatus(0, 0, 420, 420, 0, is_current=False)]),
        ("routes", Level.WARNING, "how far ingest 0 to broker 0 is behind is unknown"),
    ),
    "a clock ahead": (
        of_broker(skew_ms=2_500),
        ("clocks", Level.WARNING, "broker 0 is 2s500ms ahead of this machine's"),
    ),
    "a clock far behind": (
        of_broker(skew_ms=-31_000),
        ("clocks", Level.PROBLEM, "31s behind this machine's"),
    ),
    "ahead of the store": (
        of_broker(store_clock_ahead_ms=45_000),
        ("clocks", Level.PROBLEM, "45s ahead of the store's"),
    ),
    "a store that overwrites": (
        of_broker(store_problem="it ignores If-None-Match", store_test_ms=None),
        ("store", Level.PROBLEM, "broker 0: it ignores If-None-Match"),
    ),
    "a slow store": (
        of_broker(store_test_ms=4_000),
        ("store", Level.WARNING, "took 4000 ms"),
    ),
    "a store of the WALs that overwrites": (
        of_broker(wal_store="s3://fast", wal_store_problem="it ignores If-None-Match"),
        ("store", Level.PROBLEM, "broker 0: s3://fast: it ignores If-None-Match"),
    ),
    "a slow store of the WALs": (
        of_broker(wal_store="s3://fast", wal_store_test_ms=4_000),
        ("store", Level.WARNING, "five requests of broker 0 to s3://fast took 4000 ms"),
    ),
    "a backlog of compaction": (
        of_broker(uncompacted_tables=16),
        ("compaction", Level.WARNING, "16 tables of broker 0"),
    ),
    "a backlog of compaction on a store where more may wait": (
        of_broker(uncompacted_tables=192, uncompacted_tables_max=384),
        ("compaction", Level.WARNING, "192 tables of broker 0"),
    ),
    "writes that wait for compaction": (
        of_broker(uncompacted_tables=32),
        ("compaction", Level.PROBLEM, "32 tables of broker 0"),
    ),
    "a disk that fills": (
        of_broker(disk_free_bytes=14 * GIB),
        ("disk", Level.WARNING, "14 % of the disk of broker 0 are free, 14.0 GiB"),
    ),
    "a full disk": (
        of_broker(disk_free_bytes=4 * GIB),
        ("disk", Level.PROBLEM, "4 % of the disk"),
    ),
    "a certificate that expires": (
        of_broker(certificates=(CertificateExpiry("c.pem", "CN=b", NOW_MS + 9 * DAY_MS),)),
        ("certificates", Level.WARNING, "c.pem of broker 0 (CN=b) expires in 9 days"),
    ),
    "a certificate that has expired": (
        answers(own=[CertificateExpiry("own.pem", "CN=me", NOW_MS - 1)]),
        ("certificates", Level.PROBLEM, "own.pem of this command (CN=me) has expired"),
    ),
    "a queue in quarantine": (
        with_status(queues=[queue_of(QUARANTINED)]),
        ("queues", Level.WARNING, "queue slow is in quarantine: its filter took 3 s"),
    ),
}


@pytest.mark.parametrize(("given", "wanted"), CASES.values(), ids=CASES)
def test_what_is_wrong_is_named_with_what_to_do(
    given: Answers, wanted: tuple[str, Level, str]
) -> None:
    (found,) = bad(given)

    check, level, text = wanted
    assert (found.check, found.level) == (check, level)
    assert text in found.text
    assert found.advice
    assert is_well(findings_of(given)) == (level is Level.WARNING)


def test_both_stores_are_named_and_commits_wait_for_that_of_the_wals() -> None:
    given = of_broker(store_test_ms=4_000, wal_store="s3://fast", wal_store_test_ms=20)
    given = replace(given, status=replace(given.status, store="s3://data"))

    found = [one.text for one in findings_of(given) if one.check == "store"]

    assert found == [
        "s3://data: conditional writes hold; five requests took 4000 ms at most",
        "s3://fast, for the WALs: conditional writes hold; five requests took 20 ms at most",
    ]


def test_without_the_right_to_examine_nothing_is_said_of_what_was_not_seen() -> None:
    found = findings_of(answers(caller=Caller("shop", ["inspect"]), examined=[]))

    assert {one.check for one in found} == {
        "processes",
        "permissions",
        "settings",
        "routes",
        "queues",
    }


def test_tables_are_no_backlog_where_far_more_may_wait() -> None:
    found = findings_of(of_broker(uncompacted_tables=64, uncompacted_tables_max=384))

    assert {one.level for one in found if one.check == "compaction"} == {Level.OK}


def test_the_page_has_the_numbers_of_tables_at_which_a_backlog_is_found() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "operate.md"
    (row,) = re.findall(r"^\| compaction \|(.*)\|(.*)\|$", page.read_text(), re.MULTILINE)
    stated = [[int(number) for number in re.findall(r"\b\d+\b", text)] for text in row]

    for kind in Kind:
        bounds = [
            tuning_of(kind, scheme, scheme).uncompacted_tables_max for scheme in ("file", "s3")
        ]
        assert stated == [[int(TABLES_SHARE_MAX * most) for most in bounds], bounds]


def test_processes_that_own_no_shard_have_no_store_to_be_well() -> None:
    routers = examination("router", store_test_ms=None, uncompacted_tables=None)

    found = findings_of(answers(examined=[replace(routers, certificates=())]))

    assert not {one.check for one in found} & {"store", "compaction", "certificates"}
