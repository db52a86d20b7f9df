"""Whether the caller may finish or extend leases: it must be one that may consume from their queue.

A lease token is not to be guessed, but it can be passed on, and outlives a change of the policy.
"""

from __future__ import annotations

from collections.abc import Sequence

from libs.access.current import require
from services.broker.core.lease_table import LeaseTable
from slatemq.errors import PermissionDenied


def denied_queues(leases: LeaseTable, tokens: Sequence[int]) -> dict[str, PermissionDenied]:
    """The queues of running leases from which the caller may not consume, each with the error."""
    denied = {}
    for queue_id in leases.queue_ids(tokens):
        try:
            require("consume", queue_id)
        except PermissionDenied as error:
            denied[queue_id] = error
    return denied
