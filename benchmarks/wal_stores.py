"""What a store for the write-ahead logs alone costs and saves: `python -m benchmarks.wal_stores`.

Messages of 1 KiB are published one after the other at a steady rate, claimed and acked, on S3
servers that count requests and make each write slower. Prints a table: for a million messages what
the requests cost at list prices of S3 Standard, and with the log at those of S3 Express One Zone
(with its price for uploaded bytes), and the time from publish to delivery.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.suite import servers
from benchmarks.suite.costs import BUCKET, CREDENTIALS, Counts, counting_store, counts, store_url
from benchmarks.suite.crew import Consumers, Crew, new_queue
from libs.serving.process.store_costs import EXPRESS_PRICES, LIST_PRICES

EXPRESS_UPLOAD_USD: Final = 0.0032 / 1e9
"""For a byte, beside the request."""

ON_DISK: Final = 0


class Stores(NamedTuple):
    """How long a write takes in the store of the tables, and in that of the log, in ms.

    `log_ms` None: the log is in the store of the tables; `ON_DISK`: in a folder of this machine.
    """

    tables_ms: int
    log_ms: int | None = None

    @property
    def name(self) -> str:
        if self.log_ms is None:
            return f"one store, {self.tables_ms} ms"
        log = "on a disk" if self.log_ms == ON_DISK else f"in a store of {self.log_ms} ms"
        return f"tables {self.tables_ms} ms, log {log}"


ALL: Final = (
    Stores(5),
    Stores(20),
    Stores(100),
    Stores(20, 5),
    Stores(20, ON_DISK),
)


class Found(NamedTuple):
    """USD for a million messages, by both price lists, and seconds from publish to delivery."""

    standard_usd: float
    express_usd: float
    p50_s: float
    p99_s: float


def measure(folder: Path, stores: Stores, rate: int, interval_ms: int, seconds: float) -> Found:
    """One point."""
    (folder / "tables").mkdir()
    (folder / "wal").mkdir()
    with ExitStack() as stack:
        port = stack.enter_context(counting_store(folder / "tables", stores.tables_ms))
        log_port, arguments = 0, []
        if stores.log_ms:
            log_port = stack.enter_context(counting_store(folder / "wal", stores.log_ms))
            url = f"s3://{BUCKET}?endpoint=http://127.0.0.1:{log_port}&region=us-east-1"
            arguments = ["--wal-store", f"{url}&allow_http=true"]
        elif stores.log_ms == ON_DISK:
            arguments = ["--wal-store", (folder / "wal").as_uri()]
        settings = {**CREDENTIALS, "SLATEMQ_COMMIT_INTERVAL_MS": str(interval_ms)}
        server = stack.enter_context(servers.slatemq(folder, settings, store_url(port), arguments))
        (queue,) = new_queue(server)
        count = int(rate * seconds)
        crew = Crew(server)
        crew.add("paced", queue, count, size=1024, rate=rate)
        consumers = Consumers(crew, 1, queue, count, depth=2, latencies=True)
        before = [counts(one) for one in (port, log_port) if one]
        results = crew.run()
        after = [counts(one) for one in (port, log_port) if one]
        consumers.check(results)
    times = results[-1]["latencies"]
    usd = [0.0, 0.0]
    for at, (earlier, later) in enumerate(zip(before, after, strict=True)):
        express = EXPRESS_PRICES if at else LIST_PRICES
        for kind, requests, size_bytes in _between(earlier, later):
            usd[0] += LIST_PRICES[kind] * requests / 1e6
            usd[1] += express[kind] * requests / 1e6
            usd[1] += EXPRESS_UPLOAD_USD * size_bytes if at and kind == "put" else 0.0
    millions = count / 1e6
    return Found(
        usd[0] / millions,
        usd[1] / millions,
        times[len(times) // 2],
        times[len(times) * 99 // 100],
    )


def _between(before: Counts, after: Counts) -> Iterator[tuple[str, int, int]]:
    """Requests and their bytes, by kind."""
    for name, (number, size_bytes) in after.items():
        earlier = before.get(name, [0, 0])
        kind = {"POST": "put"}.get(name.split()[0], name.split()[0].lower())
        yield kind, number - earlier[0], size_bytes - earlier[1]


def main(given: argparse.Namespace) -> None:
    print("| stores | every | messages/s | $ a million | log at Express prices | p50 ms | p99 ms |")
    print("|---|---|---|---|---|---|---|")
    for stores in [ALL[at] for at in given.stores]:
        for interval_ms in given.intervals:
            for rate in given.rates:
                with tempfile.TemporaryDirectory(prefix="bench-") as place:
                    found = measure(Path(place), stores, rate, interval_ms, given.seconds)
                express = f"{found.express_usd:,.2f}" if stores.log_ms else "–"
                times = f"{1000 * found.p50_s:,.0f} | {1000 * found.p99_s:,.0f}"
                print(
                    f"| {stores.name} | {interval_ms} ms | {rate:,} | {found.standard_usd:,.2f} | "
                    f"{express} | {times} |",
                    flush=True,
                )


def numbers(text: str) -> Sequence[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    every = ",".join(map(str, range(len(ALL))))
    parser.add_argument("--stores", type=numbers, default=every, help="0 is the first of `ALL`")
    parser.add_argument("--rates", type=numbers, default="20,200", help="messages a second")
    parser.add_argument("--intervals", type=numbers, default="0,100", help="between commits, ms")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each point")
    main(parser.parse_args())
