"""What every test may use.

Hypothesis: `make test` tries few examples, `make proofs` and HYPOTHESIS_PROFILE=full many, and
`--hypothesis-profile=thorough` runs state machines for hours, over millions of steps.
"""

from hypothesis import HealthCheck, settings

from tests.forms import examples

settings.register_profile(
    "thorough",
    max_examples=20_000,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
settings.register_profile("here", max_examples=examples(100))
settings.load_profile("here")
