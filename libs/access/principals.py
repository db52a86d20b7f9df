"""Who calls: a principal, as an authenticator found it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Method = Literal["none", "token", "jwt", "certificate"]
Attributes = Mapping[str, str | list[str]]

NAME_LENGTH_MAX: Final = 255
ATTRIBUTES_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller.

    Attributes:
        name: What policies and audit lines call it.
        method: How it proved who it is.
        attributes: What its token says of it besides, which conditions of a policy can read.
        expires_at_s: When the proof ends, in seconds since the Unix epoch; None: not by itself.
    """

    name: str
    method: Method
    attributes: Attributes = field(default_factory=dict)
    expires_at_s: float | None = None

    def is_expired(self, now_s: float) -> bool:
        return self.expires_at_s is not None and now_s >= self.expires_at_s


LIMIT_REASON: Final = "PRINCIPAL_LIMIT"
"""The reason in the error of a call that exceeds a limit of its principal."""

SHARE_REASON: Final = "PRINCIPAL_SHARE"
"""The same of a call beyond its principal's share of what a process has for all callers."""

PLACE_RETRY_MS: Final = 1_000
"""When to ask for a place again: when one becomes free is not known."""

BOUND_REASONS: Final = frozenset({LIMIT_REASON, SHARE_REASON})
"""Of both, the metadata has the name of the limit, or of the setting, as `limit`."""

ANONYMOUS: Final = Principal("anonymous", "none")
"""A caller that proved nothing. A policy may grant it something, by this name alone."""
