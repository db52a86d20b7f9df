"""What every test may use.

Hypothesis: `--hypothesis-profile=thorough` runs state machines for hours, over millions of steps.
"""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "thorough",
    max_examples=20_000,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
