"""What every test may use.

Hypothesis: `make test` tries few examples, `make proofs` and HYPOTHESIS_PROFILE=full many, and
`--hypothesis-profile=thorough` runs state machines for hours, over millions of steps.
"""

from typing import Any

from hypothesis import HealthCheck, settings

from libs.serving.process.memory import calm_collector, keep_for_good
from tests.forms import examples
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


def pytest_configure() -> None:
    calm_collector()


def pytest_collection_finish() -> None:
    """All modules of tests are loaded, and stay: the collector need not look at them again."""
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
