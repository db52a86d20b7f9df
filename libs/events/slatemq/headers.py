"""The headers of messages that are events or tasks; what makes events passes such messages over."""

from __future__ import annotations

EVENTS_HEADER = "slatemq-events"
TASKS_HEADER = "slatemq-tasks"

BACKEND_HEADERS = (EVENTS_HEADER, TASKS_HEADER)
"""What messages have by which the backend `slatemq` carries events and tasks."""
