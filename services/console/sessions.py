"""Who is logged in: a cookie that only this process can read and write, and the tokens of forms.

The cookie holds the person's own token, encrypted with a key that is made at each start. So the
process keeps nothing but who has logged out, and its end logs everyone out.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import time
from dataclasses import dataclass, field
from typing import Final

from cryptography.fernet import Fernet, InvalidToken

TOKEN_LENGTH_MAX: Final = 2_800
"""A longer token makes a cookie over 4,096 bytes, which browsers drop."""

ENDED_MAX: Final = 10_000
"""Sessions that have logged out and are remembered, some megabytes; one more forgets the oldest."""

NOTICE_S: Final = 60
"""How long the result of an action may wait for the page that shows it."""


@dataclass(frozen=True)
class Session:
    """A browser.

    Attributes:
        token: That of the person; empty before a login.
        session_id: Random; another one after each login.
        until_s: When the cookie that it came with ends, in seconds since the Unix epoch.
    """

    token: str = field(default="", repr=False)
    session_id: str = field(default_factory=lambda: secrets.token_hex(16))
    until_s: float = field(default=math.inf, compare=False)


class SessionSeal:
    """Seals what browsers keep for us, with a key for each purpose: none passes for another."""

    def __init__(self, session_s: int) -> None:
        """Sessions end after `session_s`."""
        self.session_s = session_s
        self._sessions = Fernet(Fernet.generate_key())
        self._notices = Fernet(Fernet.generate_key())
        self._form_key = secrets.token_bytes(32)
        self._ended: dict[str, float] = {}  # until when their cookies last; the oldest first

    def seal(self, session: Session) -> str:
        return self._sessions.encrypt(f"{session.session_id}\n{session.token}".encode()).decode()

    def open(self, cookie: str) -> Session | None:
        """The session of a cookie; None where it is not ours, too old, or has logged out."""
        text = _opened(self._sessions, cookie, self.session_s)
        if text is None:
            return None
        session_id, _, token = text.partition("\n")
        until_s = self._sessions.extract_timestamp(cookie) + self.session_s
        session = Session(token, session_id, until_s)
        return None if self.has_ended(session) else session

    def end(self, session: Session) -> None:
        """From now on the cookie of this session proves nothing."""
        now_s = time.time()  # Fernet's clock, in whole seconds.
        for session_id, until_s in list(self._ended.items()):
            if until_s > now_s and len(self._ended) < ENDED_MAX:
                break
            del self._ended[session_id]
        self._ended[session.session_id] = now_s + self.session_s + 1

    def has_ended(self, session: Session) -> bool:
        """Whether its cookie is too old by now, or it has logged out."""
        return time.time() > session.until_s or session.session_id in self._ended

    def seal_notice(self, text: str) -> str:
        return self._notices.encrypt(text.encode()).decode()

    def open_notice(self, cookie: str) -> str:
        """What the page after an action says; empty for what is not ours."""
        return _opened(self._notices, cookie, NOTICE_S) or ""

    def form_token(self, session: Session) -> str:
        """What the forms of a session carry, so that no other site can send them."""
        key, name = self._form_key, session.session_id.encode()
        return hmac.new(key, name, hashlib.sha256).hexdigest()

    def is_form_token(self, session: Session, given: str) -> bool:
        return hmac.compare_digest(self.form_token(session).encode(), given.encode())


def _opened(seal: Fernet, cookie: str, age_s: int) -> str | None:
    try:
        return seal.decrypt(cookie, ttl=age_s).decode()
    except (InvalidToken, ValueError, TypeError):
        return None
