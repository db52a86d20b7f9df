"""Who did what: a log line for each act that changes more than messages.

Never payloads, headers or tokens: a line has names, places and results alone.
"""

from __future__ import annotations

import logging
from typing import Final

from libs.access.principals import Principal

AUDITED: Final = frozenset({"edit", "administer", "operate"})
"""The verbs of these acts."""

AUDIT_LOGGER: Final = "slatemq.audit"
"""The name of the logger, for those who send its lines elsewhere."""

_audit = logging.getLogger(AUDIT_LOGGER)


def record_act(principal: Principal, act: str, subjects: str, peer: str, outcome: str) -> None:
    """Log one act.

    Args:
        principal: Who called.
        act: The method, as in `/slatemq.v1.QueueService/PurgeQueue`.
        subjects: The queues that the request named; empty where it named none.
        peer: Where the call came from, as gRPC has it: `ipv4:127.0.0.1:50000`.
        outcome: `OK`, or the status code of the refusal.
    """
    facts = {
        "principal": principal.name,
        "proof": principal.method,
        "act": act,
        "subjects": subjects,
        "peer": peer,
        "outcome": outcome,
    }
    _audit.log(logging.INFO if outcome == "OK" else logging.WARNING, "audit", extra=facts)
