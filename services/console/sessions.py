"""Who is logged in: a cookie that only this process can read and write, and the tokens of forms.

The cookie holds the person's own token, encrypted with a key that is made at each start. So the
process keeps nothing, and its end logs everyone out.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import Final

from cryptography.fernet import Fernet, InvalidToken

TOKEN_LENGTH_MAX: Final = 2_800
"""A longer token makes a cookie over 4,096 bytes, which browsers drop."""

NOTICE_S: Final = 60
"""How long the result of an action may wait for the page that shows it."""


@dataclass(frozen=True)
class Session:
    """A browser.

    Attributes:
        token: That of the person; empty before a login.
        session_id: Random; another one after each login.
    """

    token: str = field(default="", repr=False)
    session_id: str = field(default_factory=lambda: secrets.token_hex(16))


class SessionSeal:
    """Seals what browsers keep for us."""

    def __init__(self, session_s: int) -> None:
        """Sessions end after `session_s`."""
        self.session_s = session_s
        self._fernet = Fernet(Fernet.generate_key())
        self._form_key = secrets.token_bytes(32)

    def seal(self, session: Session) -> str:
        return self._fernet.encrypt(f"{session.session_id}\n{session.token}".encode()).decode()

    def open(self, cookie: str) -> Session | None:
        """The session of a cookie; None where it is not ours, or too old."""
        text = self._opened(cookie, self.session_s)
        if text is None:
            return None
        session_id, _, token = text.partition("\n")
        return Session(token, session_id)

    def seal_notice(self, text: str) -> str:
        return self._fernet.encrypt(text.encode()).decode()

    def open_notice(self, cookie: str) -> str:
        """What the page after an action says; empty for what is not ours."""
        return self._opened(cookie, NOTICE_S) or ""

    def form_token(self, session: Session) -> str:
        """What the forms of a session carry, so that no other site can send them."""
        key, name = self._form_key, session.session_id.encode()
        return hmac.new(key, name, hashlib.sha256).hexdigest()

    def is_form_token(self, session: Session, given: str) -> bool:
        return hmac.compare_digest(self.form_token(session).encode(), given.encode())

    def _opened(self, cookie: str, age_s: int) -> str | None:
        try:
            return self._fernet.decrypt(cookie, ttl=age_s).decode()
        except (InvalidToken, ValueError, TypeError):
            return None
