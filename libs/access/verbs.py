"""What a policy permits principals to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, get_args

Verb = Literal["publish", "consume", "inspect", "edit", "administer", "operate"]

VERBS: Final[Mapping[Verb, str]] = {
    "publish": "publish messages",
    "consume": "claim, ack, nack and extend leases",
    "inspect": "read settings, states, counts and stored messages",
    "edit": "cancel, reschedule and edit messages; redrive and settle dead letters",
    "administer": "create, change, pause, purge and delete queues",
    "operate": "run jobs, read and change what concerns the whole instance",
}
"""Each verb, and what it permits. All but `operate` are about queues."""

assert set(VERBS) == set(get_args(Verb))
