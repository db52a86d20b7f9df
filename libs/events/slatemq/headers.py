"""The headers of messages that are events or tasks; what makes events passes such messages over."""

from __future__ import annotations

EVENTS_HEADER = "slatemq-events"
TASKS_HEADER = "slatemq-tasks"
