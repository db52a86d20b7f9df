"""The addresses that a client is given: `host:port`, several of them in a list or with commas."""

from __future__ import annotations

import re
from collections.abc import Iterable

from slatemq._checks import check_text
from slatemq.errors import InvalidArgument

_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\],]+):(?P<port>\d{1,5})", re.ASCII)


def addresses_of(endpoint: str | Iterable[str], field: str = "endpoint") -> tuple[str, ...]:
    """The addresses, each once, in the order given. Raises InvalidArgument about `field`."""
    if isinstance(endpoint, str):
        listed: list[str] = endpoint.split(",")
    elif isinstance(endpoint, Iterable):
        listed = list(endpoint)
    else:
        raise _wrong(field, endpoint)
    for address in listed:
        if not isinstance(address, str):
            raise _wrong(field, address)
        check_text(field, address)
    addresses = tuple(dict.fromkeys(address.strip() for address in listed))
    for address in addresses:
        if "@" in address:
            problem = "must have no user and no password: write host:port, e.g. 127.0.0.1:7420"
            raise InvalidArgument(field, problem)
        found = _ADDRESS.fullmatch(address)
        if found is None or not 1 <= int(found["port"]) <= 65_535:
            raise InvalidArgument(
                field, f"{address!r} is not an address: write host:port, e.g. 127.0.0.1:7420"
            )
    if not addresses:
        raise InvalidArgument(field, "must name at least one address")
    return addresses


def _wrong(field: str, value: object) -> InvalidArgument:
    expected = "host:port, several with commas or as a list"
    return InvalidArgument(field, f"must be {expected}, not {type(value).__name__}")
