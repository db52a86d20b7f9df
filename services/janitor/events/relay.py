"""The relay of one janitor: its runs. Loaded where events are on."""

from __future__ import annotations

from libs.events.settings import QueueSettings
from libs.serving.events.relay import ProcessRelay
from libs.serving.telemetry import Telemetry
from services.janitor.events.owed_events import OwedEvents
from services.janitor.runs.history import RunStore

__all__ = ["JanitorRelay"]


class JanitorRelay(ProcessRelay):
    """Publishes the events of a janitor's runs from `begin` until `stop`.

    Attributes:
        events: What it publishes.
    """

    def __init__(
        self, settings: QueueSettings, telemetry: Telemetry, store: RunStore, number: int
    ) -> None:
        """Of the janitor of this number, whose runs the store has. See ProcessRelay."""
        super().__init__(settings, telemetry)
        self.events = OwedEvents(store, number, f"janitor-{number}", keeps=self.keeps)
