"""POSTs each event to a URL, signed, until the receiver takes it.

The queue does what a webhook sender needs: an event that was not taken (any answer but 2xx, or
none) comes again after the queue's backoff, 1 s at first and 1 h at last; after 30 attempts, which
takes half a day, it is a dead letter, which `slatemq failed redrive` sends once more. All of that
survives this program, of which any number may run.

An event may be POSTed more than once: receivers go by its ID, the header `webhook-id`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import aiohttp

import slatemq
from examples.events.queues import ensure_queue, parser
from examples.events.signatures import check_secret, make_secret, sign
from slatemq.errors import InvalidArgument, SlateMQError
from slatemq.events import decode_event

log = logging.getLogger("webhooks")

BACKOFF = slatemq.Backoff.exponential(1, max=3600, jitter=0.5)
ATTEMPTS = 30

RETRY_AFTER_S_MAX = 3600.0
"""As long as the backoff gets by itself."""

POST_SECONDS = 15.0
AT_ONCE = 16


class Webhook:
    """One receiver."""

    def __init__(self, session: aiohttp.ClientSession, url: str, secret: str) -> None:
        """POST to `url`."""
        self._session = session
        self._url = url
        self._secret = secret

    async def deliver(self, message: slatemq.Received) -> None:
        """POST one event; what is not taken goes back to the queue."""
        try:
            event = decode_event(message.payload)
        except InvalidArgument as error:
            await message.fail(f"not an event: {error}")
            return
        try:
            problem, delay = await self._post(event.id, message.payload)
        except (aiohttp.ClientError, TimeoutError) as error:
            problem, delay = f"no answer: {str(error) or type(error).__name__}", None
        if problem:
            log.warning("%s, attempt %d: %s", event.id, message.attempts_count, problem)
            await message.nack(problem, delay)

    async def _post(self, event_id: str, body: bytes) -> tuple[str, float | None]:
        """Why it was not taken, and how long the receiver wants to be left alone, if it says."""
        headers = {**sign(self._secret, event_id, body), "content-type": "application/json"}
        # A redirect could send the event to an unintended server.
        async with self._session.post(
            self._url, data=body, headers=headers, allow_redirects=False
        ) as response:
            if 200 <= response.status < 300:
                return "", None
            delay = wait_s(response.headers.get("retry-after", ""), datetime.now(UTC))
            return f"the receiver answered {response.status}", delay


def wait_s(retry_after: str, now: datetime) -> float | None:
    """How long to wait by the header Retry-After: seconds, or a date (RFC 9110, 10.2.3).

    None leaves it to the backoff, as where that time is over by our clock.
    """
    try:
        if retry_after.isdecimal():
            seconds = float(retry_after)
        else:
            until = parsedate_to_datetime(retry_after)
            seconds = (until.replace(tzinfo=until.tzinfo or UTC) - now).total_seconds()
    except (ValueError, OverflowError):
        return None
    return min(seconds, RETRY_AFTER_S_MAX) if seconds > 0 else None


async def run(
    endpoint: str, queue_id: str, prefix: str, types: Sequence[str], url: str, secret: str
) -> None:
    """Deliver until ended."""
    timeout = aiohttp.ClientTimeout(total=POST_SECONDS)
    async with (
        slatemq.connect(endpoint) as client,
        aiohttp.ClientSession(timeout=timeout) as session,
    ):
        await ensure_queue(client, queue_id, prefix, types, max_attempts=ATTEMPTS, backoff=BACKOFF)
        webhook = Webhook(session, url, secret)
        await client.process(queue_id, webhook.deliver, concurrency=AT_ONCE)


def main() -> None:
    """The command."""
    flags = parser("webhooks", __doc__, "webhooks")
    flags.epilog = "The variable WEBHOOK_SECRET has the secret that both ends know."
    flags.add_argument(
        "--type", action="append", default=[], help="only events of this type; may be repeated"
    )
    flags.add_argument("url", help="where to POST to")
    given = flags.parse_args()
    secret = os.environ.get("WEBHOOK_SECRET")
    if not secret:
        flags.error(f"WEBHOOK_SECRET is not set; a new one: {make_secret()}")
    try:
        check_secret(secret)
    except ValueError as error:
        flags.error(f"WEBHOOK_SECRET: {error}; a new one: {make_secret()}")
    logging.basicConfig(level=logging.INFO)
    try:
        asyncio.run(run(given.endpoint, given.queue, given.prefix, given.type, given.url, secret))
    except SlateMQError as error:
        sys.exit(f"webhooks: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
