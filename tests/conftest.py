"""What every test may use.

Hypothesis tries few examples, with `make proofs` and HYPOTHESIS_PROFILE=full many, and with
`--hypothesis-profile=thorough` it runs state machines for hours, over millions of steps.
"""

import hashlib
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from slatedb.uniffi import DbBuilder

from libs.serving import server
from libs.serving.process.memory import calm_collector, keep_for_good
from slatemq._tokens import COST
from tests import ready_process
from tests.forms import examples
from tests.side_by_side import ByFile, has_spark, load_share
from tests.slow_steps import BOUND_MS, summary

settings.register_profile(
    "thorough",
    max_examples=20_000,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
# How long inputs and examples take is the machine's matter: a busy one fails nothing by it.
settings.register_profile(
    "here",
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("here")


def pytest_configure(config: pytest.Config) -> None:
    calm_collector()
    # What a shell runs in the background ignores Ctrl-C, and so does all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("numprocesses", None):
        ready_process.begin_for_all()


def pytest_sessionstart(session: pytest.Session) -> None:
    load_share(session.config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile | None:
    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not has_spark(item.nodeid))


def pytest_collection_finish() -> None:
    """All modules of tests are loaded, and stay: the collector need not look at them again."""
    keep_for_good()


WITH_METRICS = DbBuilder.with_metrics_recorder

CHEAP_COST = 16


@pytest.fixture(scope="session", autouse=True)
def _unwatched_openings() -> Iterator[None]:
    """No metrics of SlateDB, which take two thirds of the time that it takes to open a database."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DbBuilder, "with_metrics_recorder", lambda *_: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _collected_services() -> Iterator[None]:
    """A service keeps what there is as it begins to serve: here, all that tests before it left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "keep_for_good", lambda: None)
        yield


@pytest.fixture(scope="module")
def watched_openings(_unwatched_openings: None) -> Iterator[None]:
    """Openings that count their requests, as in a service."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DbBuilder, "with_metrics_recorder", WITH_METRICS)
        yield


@pytest.fixture(scope="module")
def cheap_hashes() -> Iterator[None]:
    """Hashes of tokens that take a thousandth of the 50 ms that each does otherwise.

    For files whose tokens are made and proved in this process alone.
    """
    scrypt = hashlib.scrypt

    def cheap(password: bytes, *, n: int, **others: Any) -> bytes:
        return scrypt(password, n=CHEAP_COST if n == COST else n, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashlib, "scrypt", cheap)
        yield


@pytest.fixture(scope="module", autouse=True)
def _left_open() -> Iterator[None]:
    """Find what a file left open at its own end: later, another file's test would fail by it.

    What is still in use stays out of later looks, which would take a second each in the end.
    """
    yield
    keep_for_good()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    ended = [
        report
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "teardown"
    ]
    if lines := summary(ended):
        terminalreporter.section(f"steps of event loops over {BOUND_MS} ms of processor time")
        for line in lines:
            terminalreporter.line(line)
