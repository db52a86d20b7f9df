"""Our filters beside cel-expr-python, the CEL authors' C++ library (docs/decisions/0061).

pip install --target /tmp/cel cel-expr-python==0.1.3
PYTHONPATH=/tmp/cel python -m benchmarks.filter_engines
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from cel_expr_python import cel

from libs.filters import Facts, Filter, check, context, timestamp

FILTERS = (
    'headers.type == "order"',
    "int(headers.amount) > 1000",
    'headers.tenant == "t7" && int(headers.amount) > 1000',
    'received_at - created_at > duration("5m")',
    'headers.exists(k, k.startsWith("debug-"))',
    'headers.type.matches("^or.*r$")',
)
HEADERS = {"type": "order", "region": "eu", "tenant": "t7", "amount": "1200"}
QUEUES = (1, 10, 100, 1000, 10_000)
ROUNDS = 7
"""The fastest one counts: it is the least disturbed by other work on the machine."""


def environment() -> Any:
    """The variables of a queue's filter, declared for the other library."""
    kinds = cel.Type
    return cel.NewEnv(
        variables={
            "headers": kinds.Map(kinds.STRING, kinds.STRING),
            "created_at": kinds.TIMESTAMP,
            "received_at": kinds.TIMESTAMP,
            "visible_at": kinds.TIMESTAMP,
            "retention": kinds.DURATION,
            "size": kinds.INT,
            "message_id": kinds.INT,
        }
    )


def values(facts: Facts) -> dict[str, object]:
    """All variables of a message."""
    return {
        "headers": facts.headers,
        "size": facts.size,
        "created_at": timestamp(facts.created_at_ms),
        "received_at": timestamp(facts.received_at_ms),
        "visible_at": timestamp(facts.visible_at_ms),
        "retention": timedelta(seconds=facts.retention_s),
        "message_id": facts.message_id,
    }


def best_us(turns: int, work: Callable[..., object], *arguments: object) -> float:
    """µs for one turn, in the fastest round."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(turns):
            work(*arguments)
        rounds.append((time.perf_counter() - began) * 1e6 / turns)
    return min(rounds)


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / (1 << 20)


def evaluate(expression: Any, activation: Any) -> object:
    return expression.eval(activation).value()


def match_all(filters: list[Filter], facts: Facts) -> None:
    message = context(facts, ())
    for one in filters:
        one.matches(message)


def evaluate_all(env: Any, expressions: list[Any], headers: dict[str, str]) -> None:
    activation = env.Activation({"headers": headers, "size": 100})
    for one in expressions:
        one.eval(activation).value()


def main() -> None:
    env = environment()
    facts = Facts(HEADERS, 1_700_000_000_000, 1_700_000_000_000, 100, 1_700_000_000_000, 0, 1)
    print("µs: ours / cel-expr-python")
    for headers in (4, 24):
        more = facts._replace(headers=HEADERS | {f"h{n}": "v" * 20 for n in range(headers - 4)})
        ours = best_us(2000, context, more, ())
        theirs = best_us(2000, env.Activation, {"headers": more.headers, "size": more.size})
        print(f"context of {headers} headers: {ours:.2f} / {theirs:.2f}")
    message, activation = context(facts), env.Activation(values(facts))
    for source in FILTERS:
        ours, theirs = best_us(20, check, source), best_us(100, env.compile, source)
        print(f"{source}: check {ours:.0f} / {theirs:.0f}", end="")
        ours = best_us(2000, Filter(source).matches, message)
        theirs = best_us(2000, evaluate, env.compile(source), activation)
        print(f", evaluate {ours:.2f} / {theirs:.2f}")
    for count in QUEUES:
        sources = [f"int(headers.amount) > {n}" for n in range(count)]
        before = resident_mib()
        filters = [Filter(source) for source in sources]
        between = resident_mib()
        expressions = [env.compile(source) for source in sources]
        after = resident_mib()
        turns = max(2000 // count, 1)
        ours = best_us(turns, match_all, filters, facts)
        theirs = best_us(turns, evaluate_all, env, expressions, HEADERS)
        print(f"{count} filters without an index: {ours:.1f} / {theirs:.1f}", end="")
        print(f"; MiB {between - before:.0f} / {after - between:.0f}")


if __name__ == "__main__":
    main()
