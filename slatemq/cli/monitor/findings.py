"""What `slatemq doctor` finds in what the processes of an instance have answered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from slatemq._clocks import SKEW_MS_MAX
from slatemq._counts import counted
from slatemq.cli.parameters import format_duration, format_time

if TYPE_CHECKING:
    from slatemq._admin.examining import Caller, CertificateExpiry, Examination
    from slatemq._admin.instance import Status

SKEW_MS_BAD: Final = 30_000
"""A clock this far off is a problem: a minute ahead of the store, owners of shards do not start."""

STORE_TEST_MS_MAX: Final = 2_000
"""The test makes five requests; each commit takes as long as one of them."""

TABLES_SHARE_MAX: Final = 0.5
"""Of the tables that may wait to be compacted."""

DAY_MS: Final = 86_400_000
EXPIRY_MS_MIN: Final = 14 * DAY_MS
EXPIRY_MS_BAD: Final = 2 * DAY_MS

FREE_PERCENT_MIN: Final = 15
FREE_PERCENT_BAD: Final = 5

EVERY_KIND: Final[Mapping[str, str]] = {
    "ingest": "nothing can be published",
    "router": "nothing is routed to queues",
    "broker": "there are no queues",
    "janitor": "what is over stays stored",
}
"""What an instance lacks without a process of this kind."""


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: What was looked at, such as `clock`.
        level: How it is.
        text: What was found.
        advice: What to do; empty where it is well.
    """

    check: str
    level: Level
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Answers:
    """What the instance has answered.

    Attributes:
        status: How its processes, routes and queues are.
        caller: Who asks, and what that may do.
        examined: What each process has found; empty where the caller may not ask.
        own: The certificates of this client.
        version: Of this command.
        now_ms: By the clock of this machine.
    """

    status: Status
    caller: Caller
    examined: Sequence[Examination]
    own: Sequence[CertificateExpiry]
    version: str
    now_ms: int


def findings_of(answers: Answers) -> list[Finding]:
    """All findings, check by check; each check has at least one."""
    found: list[Finding] = []
    checks = {
        "processes": _processes,
        "permissions": _permissions,
        "settings": _settings,
        "versions": _versions,
        "topology": _topology,
        "routes": _routes,
        "clocks": _clocks,
        "store": _stores,
        "compaction": _compaction,
        "disk": _disks,
        "certificates": _certificates,
        "queues": _queues,
    }
    for check, look in checks.items():
        bad = [Finding(check, *one) for one in look(answers) if one[0] is not Level.OK]
        well = [Finding(check, *one) for one in look(answers) if one[0] is Level.OK]
        found += bad or well
    return found


Found = Iterator[tuple[Level, str, str]]
"""Level, text and advice. What is ok is shown where nothing else is."""


def _processes(answers: Answers) -> Found:
    services = answers.status.services
    yield Level.OK, f"{counted(len(services), 'process')} serving", ""
    for one in services:
        if not one.serving:
            what = f"{one.service} {one.shard} at {one.address} does not serve: {one.detail}"
            yield Level.PROBLEM, what, "look at its log; start it again where it has ended"
        elif one.detail:
            what = f"{one.service} {one.shard} at {one.address} serves, but {one.detail}"
            yield Level.WARNING, what, "look at its log"
    kinds = {one.service for one in services}
    for kind, lack in EVERY_KIND.items():
        if kind not in kinds:
            level = Level.WARNING if kind == "janitor" else Level.PROBLEM
            yield level, f"there is no {kind}: {lack}", f"start one: python -m services.{kind}"


def _permissions(answers: Answers) -> Found:
    caller = answers.caller
    if not caller.principal:
        yield Level.OK, "there is no policy: every caller may do everything", ""
        return
    yield Level.OK, f"{caller.principal!r} may {', '.join(caller.verbs)}", ""
    for verb, lack in (
        ("operate", "clocks, stores, versions and routes were not examined"),
        ("inspect", "no queue was examined"),
    ):
        if verb not in caller.verbs:
            what = f"{caller.principal!r} may not {verb}: {lack}"
            yield Level.WARNING, what, f"bind a role with the verb {verb} to it in the policy"


def _settings(answers: Answers) -> Found:
    status = answers.status
    yield Level.OK, f"all run with instance record {status.instance_number}", ""
    if status.settings_problem:
        what = f"no process can read the instance record: {status.settings_problem}"
        advice = "restart nothing before it can be read: docs/how-to/instance.md says what to do"
        yield Level.PROBLEM, what, f"{advice} where it is lost"
    for one in status.services:
        name = f"{one.service} {one.shard}"
        if 0 < one.instance_number < status.instance_number:
            what = f"{name} runs with instance record {one.instance_number}"
            yield Level.WARNING, f"{what}, not {status.instance_number}", "restart it"
        if one.open_without:
            what = f"other machines can reach {name} without {' and '.join(one.open_without)}"
            advice = (
                "set --tls-cert, --tls-key, --tls-ca and --access-policy (docs/how-to/secure.md)"
            )
            yield Level.PROBLEM, what, advice


def _versions(answers: Answers) -> Found:
    versions = {answers.version: ["this command"]}
    for one in _answered(answers):
        versions.setdefault(one.version, []).append(_name(one))
    if not _answered(answers):
        return
    yield Level.OK, f"all run {answers.version}, as does this command", ""
    if len(versions) > 1:
        parts = (f"{version}: {', '.join(names)}" for version, names in sorted(versions.items()))
        advice = "install one version everywhere, and restart the processes of others, in any order"
        yield Level.WARNING, f"versions differ: {'; '.join(parts)}", advice


def _topology(answers: Answers) -> Found:
    answered = _answered(answers)
    if answered:
        yield Level.OK, "each address of the topology is that of its process", ""
    for one in answered:
        if one.asked != (one.service, one.shard):
            asked = f"{one.asked[0]} {one.asked[1]}"
            what = f"the topology has {one.address} as {asked}, where {_name(one)} answers"
            yield Level.PROBLEM, what, f"restart {asked}: its start writes its address"
    for one in answers.examined:
        if one.problem:
            what = f"{one.asked[0]} {one.asked[1]} at {one.address} did not answer: {one.problem}"
            yield Level.PROBLEM, what, "look at its log; `slatemq status` shows its health"
    for shard in answers.status.unlisted_brokers:
        what = f"broker {shard} did not list its queues"
        yield Level.PROBLEM, what, f"look at the log of broker {shard}"


def _routes(answers: Answers) -> Found:
    """The cursors were read before the logs' ends, which never move back."""
    ends = {
        one.shard: one.durable_sequence
        for one in _answered(answers)
        if one.durable_sequence is not None
    }
    for one in answers.status.routes:
        end = ends.get(one.ingest_shard)
        route = f"ingest {one.ingest_shard} to broker {one.broker_shard}"
        if end is not None and one.cursor > end:
            what = f"{route} is routed to {one.cursor}, and the log ends at {end}"
            advice = (
                f"ingest {one.ingest_shard} has lost what it had stored: was it started on an old "
                "copy, or on another root? Stop it, and see docs/how-to/repair.md"
            )
            yield Level.PROBLEM, what, advice
        elif not one.is_current:
            what = f"how far {route} is behind is unknown"
            advice = (
                f"look at the log of ingest {one.ingest_shard}; the router asks it every second"
            )
            yield Level.WARNING, what, advice
    if answers.status.routes:
        yield Level.OK, f"{counted(len(answers.status.routes), 'route')}, none beyond its log", ""


def _clocks(answers: Answers) -> Found:
    advice = "let NTP or chrony set the clocks of all machines"
    answered = _answered(answers)
    if answered:
        yield Level.OK, f"all are within {SKEW_MS_MAX // 1000} s of this machine's", ""
    for one in answered:
        if abs(one.skew_ms) > SKEW_MS_MAX:
            what = f"the clock of {_name(one)} is {_off(one.skew_ms)} this machine's"
            yield _level(abs(one.skew_ms) > SKEW_MS_BAD), what, advice
        ahead_ms = one.store_clock_ahead_ms or 0
        # Stores round down to whole seconds.
        if not -SKEW_MS_MAX <= ahead_ms <= 2 * SKEW_MS_MAX:
            what = f"the clock of {_name(one)} is {_off(ahead_ms)} the store's"
            yield _level(abs(ahead_ms) > SKEW_MS_BAD), what, advice


def _stores(answers: Answers) -> Found:
    answered = _answered(answers)
    tested = [one for one in answered if one.store_test_ms is not None]
    if tested:
        slowest = max(one.store_test_ms or 0 for one in tested)
        what = f"{answers.status.store or 'the store'}: conditional writes hold; five requests"
        yield Level.OK, f"{what} took {slowest} ms at most", ""
    for wal_store in sorted({one.wal_store for one in answered} - {""}):
        tests = [one.wal_store_test_ms or 0 for one in answered if one.wal_store == wal_store]
        what = f"{wal_store}, for the WALs: conditional writes hold; five requests"
        yield Level.OK, f"{what} took {max(tests)} ms at most", ""
    for one in answered:
        commits_in = one.wal_store or "the store"
        if one.store_problem:
            yield Level.PROBLEM, f"{_name(one)}: {one.store_problem}", _STORE_ADVICE
        if one.wal_store_problem:
            what = f"{_name(one)}: {one.wal_store}: {one.wal_store_problem}"
            yield Level.PROBLEM, what, _STORE_ADVICE
        took_ms = (one.wal_store_test_ms if one.wal_store else one.store_test_ms) or 0
        if took_ms > STORE_TEST_MS_MAX:
            what = f"five requests of {_name(one)} to {commits_in} took {took_ms} ms"
            advice = "each commit takes such a request: run the process near its store"
            yield Level.WARNING, what, advice


_STORE_ADVICE: Final = "see docs/how-to/object-stores.md, and the store's own health"


def _compaction(answers: Answers) -> Found:
    owners = [one for one in _answered(answers) if one.uncompacted_tables is not None]
    if owners:
        most = max(one.uncompacted_tables or 0 for one in owners)
        yield Level.OK, f"at most {counted(most, 'table')} of a shard to be compacted", ""
    for one in owners:
        tables, tables_max = one.uncompacted_tables or 0, one.uncompacted_tables_max or 0
        if tables_max and tables >= TABLES_SHARE_MAX * tables_max:
            name = _name(one)
            waiting = counted(tables, f"table of {name} waits", f"tables of {name} wait")
            what = f"{waiting} to be compacted"
            advice = (
                f"from {tables_max} on, writes wait: look for a slow store, or a process without "
                "processor time; add shards where the load stays"
            )
            yield _level(tables >= tables_max), what, advice


def _disks(answers: Answers) -> Found:
    advice = "run the janitor's jobs (`slatemq janitor run retention`), or enlarge the disk"
    least = 100
    for one in _answered(answers):
        if one.disk_size_bytes and one.disk_free_bytes is not None:
            percent = 100 * one.disk_free_bytes // one.disk_size_bytes
            least = min(least, percent)
            if percent < FREE_PERCENT_MIN:
                free = one.disk_free_bytes / (1 << 30)
                what = f"{percent} % of the disk of {_name(one)} are free, {free:.1f} GiB"
                yield _level(percent < FREE_PERCENT_BAD), what, advice
    if any(one.disk_size_bytes for one in _answered(answers)):
        yield Level.OK, f"at least {least} % are free", ""


def _certificates(answers: Answers) -> Found:
    owned = [(_name(one), each) for one in _answered(answers) for each in one.certificates]
    owned += [("this command", each) for each in answers.own]
    if owned:
        first = min(each.expires_at_ms for _, each in owned)
        yield Level.OK, f"the first one expires at {format_time(first)}", ""
    for name, each in owned:
        left_ms = each.expires_at_ms - answers.now_ms
        if left_ms < EXPIRY_MS_MIN:
            when = (
                f"expires in {counted(left_ms // DAY_MS, 'day')}" if left_ms > 0 else "has expired"
            )
            what = f"{each.file} of {name} ({each.subject}) {when}"
            advice = "replace the file: services read it again within seconds"
            yield _level(left_ms < EXPIRY_MS_BAD), what, advice


def _queues(answers: Answers) -> Found:
    queues = answers.status.queues
    if queues or not (answers.status.refusals or answers.status.unlisted_brokers):
        yield Level.OK, f"{counted(len(queues), 'queue')}, none in quarantine", ""
    for queue in queues:
        if queue.quarantine is not None:
            what = f"queue {queue.queue_id} is in quarantine: {queue.quarantine.reason}"
            advice = f"`slatemq queue update {queue.queue_id} --filter` with a simpler filter"
            yield Level.WARNING, what, advice


def _answered(answers: Answers) -> Sequence[Examination]:
    return [one for one in answers.examined if not one.problem]


def _name(one: Examination) -> str:
    return f"{one.service} {one.shard}"


def _level(is_bad: bool) -> Level:
    return Level.PROBLEM if is_bad else Level.WARNING


def _off(ahead_ms: int) -> str:
    return f"{format_duration(abs(ahead_ms))} {'ahead of' if ahead_ms > 0 else 'behind'}"


def is_well(findings: Iterable[Finding]) -> bool:
    """Whether there is no problem."""
    return all(one.level is not Level.PROBLEM for one in findings)
