"""What is wrong, as Spark's errors tell it among Java's stacks and Python's."""

from __future__ import annotations

__all__ = ["cause_of", "why_not", "without_stack"]


def without_stack(error: Exception) -> str:
    """All that is said before Java's stack: of a query, with the place in it, on several lines."""
    return str(error).partition("\n\tat ")[0].partition("JVM stacktrace")[0].strip()


def cause_of(error: Exception) -> str:
    """In a line, why a task failed: Python's own last line, where there is one."""
    lines = _lines(without_stack(error))
    items = [line for line in lines if line.partition(":")[0].rpartition(".")[2].isidentifier()]
    return (items or lines or [type(error).__name__])[-1].strip()


def why_not(text: str) -> str:
    """In a line, why Spark does not start."""
    if "stopped SparkContext" in text:
        return "no master answers there, or it refuses"
    if "JAVA_GATEWAY_EXITED" in text:
        return "Java has ended; what it printed before tells why"
    lines = [line.strip().removeprefix(": ") for line in _lines(text)]
    # The first line of a failed call tells which call it was.
    causes = [line for line in lines if not line.startswith(("An error occurred", "at "))]
    return (causes or lines or ["it does not say why"])[0]


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]
