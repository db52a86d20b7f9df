"""The result of a publish: the message's ID, and what else is known of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

from slatemq._checks import check_text
from slatemq._consume.handles import handle_of


class Published(int):
    """The ID of a published message: an int, with what its publish returned.

    Attributes:
        received_at_ms: When ingest accepted this publish, by its clock.
        duplicate: Nothing was stored: the dedupe key was used before, and the ID is that of the
            first message.
        task_id: Of a publish that is accepted and not stored yet, its task: the ID is 0 then, and
            `Client.wait_task` returns it. Empty = it is stored.
        task_place: The message's place in the task.
    """

    received_at_ms: int
    duplicate: bool = False
    task_id: str = ""
    task_place: int = 0

    def __new__(
        cls, message_id: int, received_at_ms: int = 0, duplicate: bool = False
    ) -> Published:
        made = int.__new__(cls, message_id)
        made.received_at_ms = received_at_ms
        if duplicate:
            made.duplicate = True
        return made

    @property
    def message_id(self) -> int:
        """The message's ID as a plain int."""
        return int(self)

    def handle(self, queue_id: str) -> str:
        """The message's handle in a queue that it reached.

        The handle of a duplicate costs a search: the receipt of the first message is unknown.
        """
        check_text("queue_id", queue_id)
        known = self.received_at_ms and not self.duplicate
        return handle_of(queue_id, self, f"p{self.received_at_ms}" if known else "")


def published(
    message_ids: Sequence[int], received_at_ms: int, duplicates: Sequence[int], task_id: str = ""
) -> list[Published]:
    """The messages of one answer; `duplicates` are places in it."""
    # As their own constructor does, without a call of it for each.
    items = list(map(int.__new__, repeat(Published), message_ids))
    for one in items:
        one.received_at_ms = received_at_ms
    for place in duplicates:
        items[place].duplicate = True
    if task_id:
        for place, one in enumerate(items):
            one.task_id, one.task_place = task_id, place
    return items
