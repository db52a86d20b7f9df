"""The cause of a failure, found in Spark's errors among Java's and Python's stacks."""

from __future__ import annotations

from slatemq._secrets import redacted


def without_stack(error: Exception) -> str:
    """The message before Java's stack: of a query, with the place in it, on several lines.

    Without secrets, which all of it may have: errors of other libraries come here, too.
    """
    return redacted(str(error).partition("\n\tat ")[0].partition("JVM stacktrace")[0].strip())


def cause_of(error: Exception) -> str:
    """Why a task failed, in one line: Python's own last line, where there is one."""
    lines = _lines(without_stack(error))
    items = [line for line in lines if line.partition(":")[0].rpartition(".")[2].isidentifier()]
    return (items or lines or [type(error).__name__])[-1].strip()


def why_not(text: str) -> str:
    """Why Spark does not start, in one line."""
    if "stopped SparkContext" in text:
        return "no master answers there, or it refuses"
    if "JAVA_GATEWAY_EXITED" in text:
        return "Java has ended; see what it printed before"
    lines = [line.strip().removeprefix(": ") for line in _lines(redacted(text))]
    # The first line of a failed call names the call.
    causes = [line for line in lines if not line.startswith(("An error occurred", "at "))]
    return (causes or lines or ["Spark gives no reason"])[0]


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]
