"""What the requests of a process to its stores cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from libs.serving.process.exits import FatalError
from libs.storage.database.addresses import PAID, Address
from libs.storage.database.statistics import Statistics
from libs.storage.objects.requests import RequestCounts

KINDS: Final = ("delete", "get", "head", "list", "put")
"""The kinds of requests, as stores charge for them."""

LIST_PRICES: Final = {"delete": 0.0, "get": 0.4, "head": 0.4, "list": 5.0, "put": 5.0}
"""USD for a million requests to S3 Standard (us-east-1) and to Google's Standard storage, by their
price lists of 2026; Azure's hot tier costs about as much."""

EXPRESS_PRICES: Final = {"delete": 0.0, "get": 0.03, "head": 0.03, "list": 1.13, "put": 1.13}
"""The same of S3 Express One Zone, which charges for the bytes of requests too."""

Prices = Mapping[str, float]


@dataclass(frozen=True)
class StoreCosts:
    """Prices of the two stores, in USD for a million requests of each kind."""

    root: Prices
    wal: Prices

    def usd(self, database: Statistics, objects: RequestCounts) -> float:
        """What these requests cost; those for small objects are to the root's store."""
        of_root = database.requests + objects.requests
        return sum(
            prices[kind] * requests[kind] / 1e6
            for prices, requests in ((self.root, of_root), (self.wal, database.wal_requests))
            for kind in KINDS
        )


def costs_of(text: str, wal_text: str, root: Address, wal: Address) -> StoreCosts:
    """The prices of the settings, or those of price lists. Raises FatalError."""
    prices = parse_prices("store_prices", text, root)
    wal_prices = parse_prices("wal_store_prices", wal_text, wal)
    return StoreCosts(prices, prices if wal == root else wal_prices)


def parse_prices(name: str, text: str, address: Address) -> Prices:
    """USD for a million requests by kind; empty text: the list prices, and none for a folder.

    Raises FatalError, naming the setting, for text of another form than `put=5,get=0.4`.
    """
    if not text:
        if address.scheme not in PAID:
            return dict.fromkeys(KINDS, 0.0)
        is_express = dict(address.options).get("s3_express") == "true"
        return EXPRESS_PRICES if is_express else LIST_PRICES
    prices = dict.fromkeys(KINDS, 0.0)
    for part in text.split(","):
        kind, _, price = part.strip().partition("=")
        if kind not in KINDS or not price.replace(".", "", 1).isdecimal():
            known = ", ".join(KINDS)
            why = f"{name}: {part!r} must be a price such as put=5.0, of one of {known}"
            raise FatalError.usage(why)
        prices[kind] = float(price)
    return prices
