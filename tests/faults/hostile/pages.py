"""What comes to the console: requests that are no good, cookies and forms of strangers."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Final

from tests.faults.hostile.floods import Attack, scaled
from tests.faults.hostile.http1 import REQUESTS, held, odd_requests
from tests.faults.hostile.http2 import Port, Writer

_LOGIN: Final = b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\n"
_FORM: Final = _LOGIN + b"Content-Type: application/x-www-form-urlencoded\r\n"


def _get(path: bytes, cookie: bytes = b"") -> bytes:
    return b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: %s\r\n\r\n" % (path, cookie)


def _post(body: bytes, cookie: bytes = b"") -> bytes:
    return _FORM + b"Cookie: %s\r\nContent-Length: %d\r\n\r\n%s" % (cookie, len(body), body)


COOKIES: Final = (
    b"slatemq=",
    b"slatemq=" + b"A" * 4_000,
    b"slatemq=\xff\xfe; slatemq=x",
    b"slatemq=eyJ0b2tlbiI6ICJvcHMifQ.AAAA",
    b"__Host-slatemq=;;;===",
    b"; ".join(b"c%d=x" % number for number in range(500)),
    b'slatemq="\\000\\377"',
)

BODIES: Final = (
    b"token=" + b"x" * 100_000,
    b"&".join(b"f%d=x" % number for number in range(5_000)),
    b"token=%ff%fe%00&form_token=%",
    b"form_token=" + b"%41" * 20_000,
    b"\x00" * 5_000,
)

PATHS: Final = (
    b"/",
    b"/queue?queue=" + b"q" * 5_000,
    b"/queue?queue=%00%ff&queue=b",
    b"/messages?queue=q&state=" + b"%F0%9F" * 200,
    b"/static/../../../../etc/passwd",
    b"/static/%2e%2e/%2e%2e/app.py",
    b"/live?path=//elsewhere",
    b"/events?task=" + b"9" * 1_000,
    b"/janitor/run?run=../../x",
)

PAGE_REQUESTS: Final = (
    *REQUESTS,
    *(_get(path) for path in PATHS),
    *(_get(b"/", cookie) for cookie in COOKIES),
    *(_post(body) for body in BODIES),
    *(_post(b"token=x", cookie) for cookie in COOKIES),
    b"GET / HTTP/1.1\r\nHost: elsewhere.example\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n",
    _LOGIN
    + b"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 9\r\n\r\n--x\r\n\r\n--",
    _LOGIN + b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    _FORM + b"Content-Length: 99999999999\r\n\r\ntoken=x",
    _FORM + b"Transfer-Encoding: chunked\r\n\r\n5\r\ntoken\r\nzz\r\n",
)


async def large_forms(port: Port, scale: float, _: random.Random) -> str:
    """Forms without a declared size, of which each goes on until it is refused."""
    sent = 0
    for _each in range(scaled(40, scale)):
        with suppress(OSError, TimeoutError):
            _reader, writer = await port.open()
            await writer.send(_FORM + b"Transfer-Encoding: chunked\r\n\r\n")
            for _part in range(64):
                if not await writer.send(b"10000\r\n" + b"x" * (1 << 16) + b"\r\n"):
                    break
                sent += 1
            writer.close()
    return f"{sent * 64} KiB taken"


async def _begun(writer: Writer, _: int) -> None:
    await writer.send(_get(b"/login")[:-4] + b"\r\nx: ")


async def _form_begun(writer: Writer, _: int) -> None:
    await writer.send(_FORM + b"Content-Length: 4000000\r\n\r\ntoken=")


async def _pages(writer: Writer, _: int) -> None:
    """Asks for much and reads nothing."""
    await writer.send(_get(b"/static/htmx.min.js") * 50)


async def serves(port: Port) -> bool:
    """Whether a person gets the page to log in."""
    reader, writer = await port.open()
    try:
        await writer.send(_get(b"/login")[:-2] + b"Connection: close\r\n\r\n")
        return b"200" in await reader.readline()
    finally:
        writer.close()


ATTACKS: Final[dict[str, Attack]] = {
    "odd requests for pages": odd_requests(PAGE_REQUESTS),
    "forms without end": large_forms,
    "headers of pages byte by byte": held(_begun),
    "forms byte by byte": held(_form_begun),
    "pages that are not read": held(_pages),
}
