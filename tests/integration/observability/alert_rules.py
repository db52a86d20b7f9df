"""The alerts, and a fault that makes each of them fire, as series of its metrics."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDER = REPOSITORY / "deploy/observability"
RULES = FOLDER / "alerts.yaml"
RUNBOOK = REPOSITORY / "docs/runbook.md"

INTERVAL_S = 15


class Fault(NamedTuple):
    """Series of metrics, a value every 15 s, in Prometheus' notation for tests.

    Attributes:
        series: Values by series.
        quiet: Until when the alert does not fire.
        firing: When it fires.
        alerts_count: How many of it fire then.
        ended: When it does not fire any more; empty: the fault goes on.
    """

    series: dict[str, str]
    quiet: str
    firing: str
    alerts_count: int = 1
    ended: str = ""


class Calm(NamedTuple):
    """What is no fault, as series like those of `Fault`: the alert does not fire until `end`."""

    series: dict[str, str]
    end: str


HERE = '{job="slatemq",service="broker",instance="b"}'
BUCKET = 'slatemq_commit_duration_seconds_bucket{service="broker",instance="b",le='
RUNS = "slatemq_janitor_runs_total"
LEASES = "slatemq_queue_failed_attempts_total"


def up(service: str, instance: str, namespace: str = "n") -> str:
    labels = f'job="slatemq",namespace="{namespace}",service="{service}",instance="{instance}"'
    return f"up{{{labels}}}"


def waiting(instance: str, shard: int = 0, namespace: str = "n") -> str:
    labels = f'job="slatemq",namespace="{namespace}",service="broker",instance="{instance}"'
    return f'slatemq_standby_waiting{{{labels},slatemq_shard="{shard}"}}'


def draining(instance: str) -> str:
    labels = f'job="slatemq",namespace="n",service="broker",instance="{instance}"'
    return f"slatemq_shard_draining{{{labels}}}"


def shards(namespace: str = "n") -> str:
    """What a router says of the brokers."""
    return f'slatemq_router_shards{{namespace="{namespace}",slatemq_service="broker"}}'


LAG = "slatemq_router_lag_seconds"

B_UP = f"up{HERE}"
B_UPTIME = f"process_uptime_seconds{HERE}"
DEAD_LETTERS = HERE.replace("{", "slatemq_queue_failed_messages_total{")
LOST = HERE.replace("{", "slatemq_queue_lost_total{")
SLOW_STEPS = HERE.replace("{", "slatemq_loop_slow_steps_total{")
FAILED_RUNS = HERE.replace("{", f'{RUNS}{{slatemq_run_state="failed",')
INTERRUPTED_RUNS = HERE.replace("{", f'{RUNS}{{slatemq_run_state="interrupted",')
OLD = "100000+15x1000"
"""The uptime of a process that began long ago."""

FAULTS = {
    "SlateMQProcessDown": Fault({f"up{HERE}": "1x8 0x12"}, "3m", "4m"),
    "SlateMQServiceAbsent": Fault(
        {
            up("ingest", "i"): "1x60",
            up("broker", "b"): "1x8 stale",
            up("broker", "other", "m"): "1x60",
        },
        "3m",
        "5m",
    ),
    "SlateMQServiceAbsent, where it never was": Fault({up("broker", "b"): "1x60"}, "1m", "3m"),
    "SlateMQServiceAbsent, in each instance": Fault(
        {
            up("ingest", "i"): "1x60",
            up("ingest", "other", "m"): "1x60",
            up("broker", "b"): "1x8 stale",
            up("broker", "other", "m"): "1x8 stale",
        },
        "3m",
        "5m",
        2,
    ),
    "SlateMQShardsMissing": Fault(
        {
            shards(): "2x100",
            shards("m"): "1x100",
            up("broker", "b0"): "1x100",
            up("broker", "b1"): "1x8 stale",
            up("broker", "other", "m"): "1x100",
        },
        "3m",
        "5m",
    ),
    "SlateMQShardsMissing, until it was given up": Fault(
        {
            shards(): "2x40 1x60",
            up("broker", "b0"): "1x100",
            up("broker", "b1"): "1x8 stale",
        },
        "3m",
        "5m",
        ended="11m",
    ),
    "SlateMQShardsMissing, since before Prometheus was there": Fault(
        {shards(): "2x100", up("broker", "b0"): "1x100"}, "1m", "5m"
    ),
    "SlateMQShardsMissing, with the last router": Fault(
        {
            shards(): "2x8 stale",
            up("broker", "b0"): "1x100",
            up("broker", "b1"): "1x8 stale",
        },
        "3m",
        "5m",
    ),
    "SlateMQShardsMissing, beside a shard whose standby took it and is then gone": Fault(
        {
            shards(): "1x100",
            shards("m"): "2x100",
            up("broker", "b0"): "1x60",
            up("broker", "b1"): "1x20 stale",
            waiting("b0"): "1x6 0x54",
            waiting("b1"): "0x8 1x12 stale",
            up("broker", "other0", "m"): "1x60",
            up("broker", "other1", "m"): "1x30 stale",
        },
        "8m30s",
        "10m30s",
    ),
    "SlateMQNotServing": Fault({f"slatemq_serving{HERE}": "1x8 0x12"}, "3m", "4m"),
    "SlateMQNotServing, beside a standby": Fault(
        {
            f"slatemq_serving{HERE}": "1x8 0x20",
            'slatemq_serving{job="slatemq",instance="standby"}': "0x40",
            'slatemq_standby_waiting{job="slatemq",instance="standby"}': "1x40",
        },
        "3m",
        "4m",
    ),
    "SlateMQStandbyMissing": Fault(
        {
            waiting("a"): "0x90",
            waiting("b"): "1x8 stale",
            waiting("again"): "_x60 1x30",
            waiting("other's", namespace="m"): "0x90",
            waiting("its", namespace="m"): "1x90",
        },
        "6m",
        "8m",
        ended="16m",
    ),
    "SlateMQStandbyMissing, of one shard beside two of another": Fault(
        {
            waiting("a0"): "0x90",
            waiting("b0"): "1x90",
            waiting("c0"): "1x90",
            waiting("a1", 1): "0x90",
            waiting("b1", 1): "1x8 stale",
        },
        "6m",
        "8m",
    ),
    "SlateMQCertificateExpires": Fault(
        {
            f"slatemq_certificate_expiry_seconds{HERE}": "604900x100",
            'slatemq_certificate_expiry_seconds{service="broker",instance="c"}': "700000x100",
        },
        "11m",
        "13m",
    ),
    "SlateMQSlowSteps": Fault({SLOW_STEPS: "0x8 0+10x4 40x60"}, "2m", "5m", ended="14m"),
    "SlateMQSlowSteps, of a kind that there was not before": Fault(
        {B_UP: "1x100", B_UPTIME: OLD, SLOW_STEPS: "_x60 30x60"}, "14m", "16m", ended="26m"
    ),
    "SlateMQSlowSteps, before the first scrape": Fault(
        {B_UP: "_x60 1x60", B_UPTIME: "_x60 10+15x60", SLOW_STEPS: "_x60 30x60"},
        "14m",
        "16m",
        ended="26m",
    ),
    "SlateMQMemoryHigh": Fault(
        {f"process_memory_usage_bytes{HERE}": "1.4e9x8 2e9x60"}, "11m", "13m"
    ),
    "SlateMQMemoryHigh, by the limit of each container": Fault(
        {
            f"process_memory_usage_bytes{HERE}": "1e9x8 1.7e9x60",
            f"slatemq_memory_limit_bytes{HERE}": "2e9x68",
            'process_memory_usage_bytes{job="slatemq",instance="small"}': "4e8x8 7e8x60",
            'slatemq_memory_limit_bytes{job="slatemq",instance="small"}': "8e8x68",
            'process_memory_usage_bytes{job="slatemq",instance="large"}': "2e9x68",
            'slatemq_memory_limit_bytes{job="slatemq",instance="large"}': "8e9x68",
        },
        "11m",
        "13m",
        2,
    ),
    "SlateMQNoRouter": Fault({"slatemq_router_lag_seconds": "0x8 stale"}, "3m", "5m"),
    "SlateMQNoRouter, of one instance of two": Fault(
        {
            up("ingest", "i"): "1x60",
            up("ingest", "other", "m"): "1x60",
            f'{LAG}{{namespace="n"}}': "0x8 stale",
            f'{LAG}{{namespace="m"}}': "0x60",
        },
        "3m",
        "5m",
    ),
    "SlateMQRoutingLag, of one instance of two": Fault(
        {f'{LAG}{{namespace="n"}}': "1x8 0+15x40", f'{LAG}{{namespace="m"}}': "0x60"}, "5m", "10m"
    ),
    "SlateMQRoutingLag": Fault(
        {
            'slatemq_router_lag_seconds{instance="r0"}': "1x8 0+15x40",
            'slatemq_router_lag_seconds{instance="r1"}': "1x12 0+15x40",
        },
        "6m",
        "10m",
    ),
    "SlateMQQueueQuarantined": Fault({"slatemq_queue_quarantined": "0x8 1x4"}, "2m", "3m"),
    "SlateMQQueueOld": Fault(
        {"slatemq_queue_oldest_claimable_age_seconds": "0+15x100"}, "20m", "21m"
    ),
    "SlateMQDeadLetters": Fault({DEAD_LETTERS: "5x20 7x80"}, "5m", "6m", ended="16m"),
    "SlateMQDeadLetters, of a queue that is new": Fault(
        {B_UP: "1x200", B_UPTIME: OLD, DEAD_LETTERS: "_x60 3x100"}, "14m", "16m", ended="26m"
    ),
    "SlateMQDeadLetters, of a broker that is new": Fault(
        {B_UP: "_x60 1x100", B_UPTIME: "_x60 9+15x100", DEAD_LETTERS: "_x60 3x100"},
        "14m",
        "16m",
        ended="26m",
    ),
    "SlateMQDeadLetters, of a broker that was started again": Fault(
        {B_UP: "1x200", B_UPTIME: "900+15x59 9+15x100", DEAD_LETTERS: "5x60 1x100"},
        "14m",
        "16m",
        ended="26m",
    ),
    "SlateMQLeasesEnd": Fault(
        {
            f'{LEASES}{{slatemq_attempt_outcome="lease_expired"}}': "0x40 0+10x100",
            f'{LEASES}{{slatemq_attempt_outcome="nacked"}}': "0+50x140",
            "slatemq_queue_claimed_messages_total": "0+100x140",
        },
        "18m",
        "28m",
    ),
    "SlateMQLeasesEnd, of one instance of two": Fault(
        {
            f'{LEASES}{{slatemq_attempt_outcome="lease_expired",namespace="n"}}': "0x40 0+10x100",
            'slatemq_queue_claimed_messages_total{namespace="n"}': "0+100x140",
            'slatemq_queue_claimed_messages_total{namespace="m"}': "0+900x140",
        },
        "18m",
        "28m",
    ),
    "SlateMQInFlightFull": Fault({"slatemq_in_flight_waiting_queues": "0x8 2x20"}, "4m", "5m"),
    "SlateMQStoreSilent": Fault(
        {f"slatemq_store_waiting_milliseconds{HERE}": "5x8 0+15000x12"}, "2m", "4m"
    ),
    "SlateMQCommitsSlow": Fault(
        {
            f'{BUCKET}"0.05"}}': "0+100x20 2000x60",
            f'{BUCKET}"1"}}': "0+100x20 2000x60",
            f'{BUCKET}"5"}}': "0+100x80",
            f'{BUCKET}"+Inf"}}': "0+100x80",
        },
        "9m",
        "12m",
    ),
    "SlateMQStoreErrors": Fault(
        {
            'slatemq_store_request_errors_total{slatemq_store_client="objects"}': "0x8 0+1x60",
            'slatemq_store_request_errors_total{slatemq_store_client="slatedb"}': "0+9x68",
        },
        "6m",
        "10m",
    ),
    "SlateMQCompactionBehind": Fault(
        {
            "slatemq_store_uncompacted_tables": "3x8 30x40",
            "slatemq_store_uncompacted_tables_max": "32x48",
            'slatemq_store_uncompacted_tables{instance="s3"}': "90x48",
            'slatemq_store_uncompacted_tables_max{instance="s3"}': "384x48",
        },
        "6m",
        "8m",
    ),
    "SlateMQWritesStall": Fault({"slatemq_store_stalls_total": "0x8 0+1x40"}, "6m", "8m"),
    "SlateMQDiskFilling": Fault(
        {
            "slatemq_store_disk_free_bytes": "200x8 90x20",
            "slatemq_store_disk_size_bytes": "1000x28",
        },
        "3m",
        "4m",
    ),
    "SlateMQOutboxHalted": Fault({"slatemq_outbox_halted": "0x8 1x8"}, "2m", "3m"),
    "SlateMQPushesRefused": Fault({"slatemq_outbox_refused_messages": "0x8 1x8"}, "2m", "3m"),
    "SlateMQPushesWait": Fault({"slatemq_outbox_age_seconds": "0+15x60"}, "5m", "7m"),
    "SlateMQEventsLate": Fault({"slatemq_queue_lag_ms": "0+15000x40"}, "3m", "7m"),
    "SlateMQEventsRefused": Fault({"slatemq_queue_refused": "0x8 1x8"}, "2m", "3m"),
    "SlateMQEventsLost": Fault({LOST: "0x8 3x400"}, "2m", "3m", ended="1h4m"),
    "SlateMQEventsLost, before the first scrape": Fault(
        {B_UP: "_x8 1x400", B_UPTIME: "_x8 9+15x400", LOST: "_x8 3x400"}, "1m", "3m", ended="1h4m"
    ),
    "SlateMQEventsLost, by a standby as it takes its shard": Fault(
        {B_UP: "1x1000", B_UPTIME: OLD, LOST: "_x300 3x400"}, "1h14m", "1h16m", ended="2h17m"
    ),
    "SlateMQJanitorFailed": Fault({FAILED_RUNS: "0x8 1x400"}, "2m", "3m", ended="1h4m"),
    "SlateMQJanitorFailed, as its successor finds": Fault(
        {
            f'{RUNS}{{slatemq_run_state="interrupted",instance="old"}}': "0x8 stale",
            INTERRUPTED_RUNS: "_x12 1x400",
            INTERRUPTED_RUNS.replace("interrupted", "done"): "_x12 1x400",
            B_UPTIME: "_x12 9+15x400",
        },
        "2m",
        "4m",
        ended="1h4m",
    ),
}  # fmt: skip

REMOVED = {
    shards(): "2x40 1x400",
    up("broker", "b0"): "1x440",
    up("broker", "b1"): "1x40 0x200 stale",
    draining("b0"): "0x440",
    draining("b1"): "0x20 1x20 stale",
}
"""Of two brokers one is drained and removed; its target stays for a while."""

CALM = {
    "SlateMQProcessDown, of a shard that was removed": Calm(REMOVED, "1h"),
    "SlateMQShardsMissing, of a shard that was removed": Calm(REMOVED, "1h40m"),
    "SlateMQShardsMissing, of a shard whose pod went as it was removed": Calm(
        REMOVED | {up("broker", "b1"): "1x40 stale"}, "1h40m"
    ),
    "SlateMQShardsMissing, while owners are started again": Calm(
        {shards(): "1x100", up("broker", "b"): "1x10 stale _x5 1x80"}, "25m"
    ),
    "SlateMQStandbyMissing, of a shard that drains": Calm(
        {waiting("b1"): "0x100", draining("b1"): "1x100"}, "20m"
    ),
    "SlateMQDeadLetters, behind a gap of Prometheus": Calm(
        {
            B_UP: "1x20 _x60 1x200",
            B_UPTIME: "100000+15x20 _x60 200000+15x200",
            DEAD_LETTERS: "5x20 _x60 5x200",
        },
        "1h",
    ),
    "SlateMQDeadLetters, of a series that one scrape lacked": Calm(
        {B_UP: "1x400", B_UPTIME: OLD, DEAD_LETTERS: "5x60 stale 5x300"}, "1h30m"
    ),
    "SlateMQEventsLost, behind a gap of Prometheus": Calm(
        {
            B_UP: "1x20 _x260 1x400",
            B_UPTIME: "100000+15x20 _x260 200000+15x400",
            LOST: "5x20 _x260 5x400",
        },
        "2h15m",
    ),
    "SlateMQJanitorFailed, behind a gap of Prometheus": Calm(
        {
            B_UP: "1x20 _x260 1x400",
            B_UPTIME: "100000+15x20 _x260 200000+15x400",
            FAILED_RUNS: "2x20 _x260 2x400",
        },
        "2h15m",
    ),
}
"""No faults, by the alert that might take them for one."""


def alert_of(fault: str) -> str:
    """The alert of a fault, whose name says behind a comma which of several it is."""
    return fault.partition(",")[0]


def alerts() -> dict[str, dict[str, Any]]:
    """The rules of all alerts, by name."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def recordings() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"] if "record" in rule]


def program(name: str) -> str:
    """The path of a program of Prometheus; skips the test where there is none, fails it in CI."""
    found = shutil.which(name)
    if found is None:
        message = f"{name} is absent (Debian's package prometheus): alerts are not checked"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return found


def rule_tests() -> dict[str, Any]:
    """What `promtool test rules` tries: each alert is quiet, and then fires."""
    return {
        "rule_files": [str(RULES)],
        "evaluation_interval": f"{INTERVAL_S}s",
        "tests": [
            {
                "name": name,
                "interval": f"{INTERVAL_S}s",
                "input_series": [
                    {"series": one, "values": values} for one, values in series.items()
                ],
                "promql_expr_test": expected,
            }
            for name, series, expected in (*_faults(), *_calm())
        ],
    }


def _faults() -> Iterator[tuple[str, dict[str, str], list[dict[str, Any]]]]:
    for name, fault in FAULTS.items():
        alert = alert_of(name)
        expected = [
            _expected(alert, fault.quiet, count=0),
            _expected(alert, fault.firing, count=fault.alerts_count),
        ]
        if fault.ended:
            expected.append(_expected(alert, fault.ended, count=0))
        yield name, fault.series, expected


def _calm() -> Iterator[tuple[str, dict[str, str], list[dict[str, Any]]]]:
    for name, calm in CALM.items():
        firing = f'ALERTS{{alertstate="firing",alertname="{alert_of(name)}"}}[{calm.end}]'
        never = {"expr": f"count_over_time({firing})", "eval_time": calm.end, "exp_samples": []}
        yield name, calm.series, [never]


def _expected(alert: str, at: str, count: int) -> dict[str, Any]:
    labels = f'{{alertname="{alert}"}}'
    return {
        "expr": f'count by (alertname) (ALERTS{{alertstate="firing",alertname="{alert}"}})',
        "eval_time": at,
        "exp_samples": [{"labels": labels, "value": count}] if count else [],
    }
