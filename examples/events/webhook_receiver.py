"""Receives webhooks: checks each signature, and takes each event once, into a table of SQLite.

The answer says that the event is safe: 204 when it is, or was there already; 401 for a wrong
signature; anything else makes the sender try again.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

from aiohttp import web

from examples.events.signatures import WrongSignature, verify

BODY_BYTES_MAX = 1 << 20


class Inbox:
    """The events that were taken, by ID."""

    def __init__(self, file: Path) -> None:
        """Open the table, or make it."""
        self._database = sqlite3.connect(file)
        self._database.execute("PRAGMA synchronous = FULL")
        self._database.execute("CREATE TABLE IF NOT EXISTS events (id TEXT PRIMARY KEY, body BLOB)")

    def take(self, event_id: str, body: bytes) -> bool:
        """Store an event; False if it was there already. What it causes belongs in here, too."""
        with self._database:
            done = self._database.execute(
                "INSERT OR IGNORE INTO events VALUES (?, ?)", (event_id, body)
            )
        return done.rowcount > 0

    def close(self) -> None:
        """Close the file."""
        self._database.close()


def make_app(secrets: Sequence[str], take: Callable[[str, bytes], object]) -> web.Application:
    """An application that gives `take` what is signed with one of the secrets."""

    async def receive(request: web.Request) -> web.Response:
        body = await request.read()
        try:
            event_id = verify(secrets, request.headers, body)
        except WrongSignature as error:
            return web.Response(status=401, text=str(error))
        take(event_id, body)
        return web.Response(status=204)

    app = web.Application(client_max_size=BODY_BYTES_MAX)
    app.router.add_post("/", receive)
    return app


def main() -> None:
    """The command."""
    flags = argparse.ArgumentParser(
        prog="python -m examples.events.webhook_receiver",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="The variable WEBHOOK_SECRET has the secrets that it goes by, with spaces between.",
    )
    flags.add_argument("--port", type=int, default=8080)
    flags.add_argument("--file", type=Path, default=Path("events.sqlite"), help="the table")
    given = flags.parse_args()
    secrets = os.environ.get("WEBHOOK_SECRET", "").split()
    if not secrets:
        flags.error("WEBHOOK_SECRET is not set")
    inbox = Inbox(given.file)

    def take(event_id: str, body: bytes) -> None:
        if inbox.take(event_id, body):
            print(body.decode(), flush=True)

    web.run_app(make_app(secrets, take), host="127.0.0.1", port=given.port, print=None)


if __name__ == "__main__":
    main()
