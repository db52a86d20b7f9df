"""(i), money: what the store's requests cost for a million messages, by rate and commit interval.

One message after the other is published at a steady rate, claimed and acked, on an S3 server that
counts requests. Prices of S3 standard and SQS standard, us-east-1, without storage and transfer
(within a region there is none for S3); SQS with batches of ten: send, receive, delete.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.suite import servers
from benchmarks.suite.crew import Consumers, Crew, new_queue
from benchmarks.suite.workloads import Measured

PUT_DOLLARS = 0.005 / 1000
"""PUT, POST and LIST."""
GET_DOLLARS = 0.0004 / 1000
"""GET and HEAD; DELETE costs nothing."""
SQS_BATCHED_DOLLARS = 0.12
"""For a million messages: 300,000 requests at $0.40 a million."""

BUCKET = "queues"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test-key", "AWS_SECRET_ACCESS_KEY": "test-secret"}
SETTLE_S = 75.0
"""Before an idle stack is counted: a minute after its start it flushes what that wrote."""

Counts = dict[str, list[int]]


@contextmanager
def counting_store(folder: Path, put_ms: int = 0) -> Iterator[int]:
    """A new S3 server with a bucket, whose writes take this much longer. Yields its port."""
    port = servers.free_port()
    command = [sys.executable, "-m", "benchmarks.suite.counting_store", str(port), str(put_ms)]
    log = folder / "store.log"
    with servers.started(command, log, cwd=servers.REPOSITORY) as process:
        servers.wait_for_port(port, process, log)
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("PUT", f"/{BUCKET}")
        connection.getresponse().read()
        connection.close()
        yield port


def store_url(port: int) -> str:
    """What a stack takes for its store."""
    return f"s3://{BUCKET}/x?endpoint=http://127.0.0.1:{port}&region=us-east-1&allow_http=true"


def counts(port: int) -> Counts:
    """Requests so far and their bytes, by method, owner and kind."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/_counts")
    found: Counts = json.loads(connection.getresponse().read())
    connection.close()
    return found


def _requests(before: Counts, after: Counts, methods: Sequence[str], kind: str = "") -> int:
    return sum(
        number - before.get(name, [0])[0]
        for name, (number, _) in after.items()
        if name.split()[0] in methods and name.endswith(kind)
    )


def _point(folder: Path, rate: int, interval_ms: int, seconds: float) -> dict[str, float]:
    with counting_store(folder) as port:
        url = store_url(port)
        settings = {**CREDENTIALS, "SLATEMQ_COMMIT_INTERVAL_MS": str(interval_ms)}
        with servers.slatemq(folder, settings, url) as server:
            if not rate:
                time.sleep(SETTLE_S)
                before, began = counts(port), time.monotonic()
                time.sleep(seconds)
                after, took_s = counts(port), time.monotonic() - began
            else:
                (queue,) = new_queue(server)
                count = int(rate * seconds)
                crew = Crew(server)
                crew.add("paced", queue, count, size=1024, rate=rate)
                consumers = Consumers(crew, 1, queue, count, depth=2, latencies=True)
                before = counts(port)
                results = crew.run()
                after = counts(port)
                consumers.check(results)
                took_s = max(seconds, max(r["ended"] - r["began"] for r in results))
    puts = _requests(before, after, ("PUT", "POST", "LIST"))
    gets = _requests(before, after, ("GET", "HEAD"))
    dollars_s = (puts * PUT_DOLLARS + gets * GET_DOLLARS) / took_s
    where = f"every {interval_ms} ms @{rate}"
    if not rate:
        return {
            "idle $ a month @0": dollars_s * 86_400 * 30,
            "idle requests a second @0": (puts + gets) / took_s,
        }
    times = results[-1]["latencies"]
    found = {
        f"$ a million, {where}": 1e6 * dollars_s / rate,
        f"publish to delivered p50 ms, {where}": 1000 * times[len(times) // 2],
        f"publish to delivered p99 ms, {where}": 1000 * times[len(times) * 99 // 100],
        f"PUTs a second, {where}": puts / took_s,
        f"GETs a second, {where}": gets / took_s,
    }
    for owner in ("ingest", "broker"):
        wal = _requests(before, after, ("PUT",), f" {owner} wal")
        found[f"of them {owner}'s WAL, {where}"] = wal / took_s
    return found


def costs(
    folder: Path, rates: Sequence[int], intervals_ms: Sequence[int], seconds: float
) -> Measured:
    """The curve. Rate 0 is an idle stack."""
    numbers: dict[str, float] = {}
    for interval_ms in intervals_ms:
        for rate in rates:
            place = folder / f"{interval_ms}-{rate}"
            place.mkdir()
            found = _point(place, rate, interval_ms, seconds)
            numbers |= found
            print("  " + "  ".join(f"{w} {v:,.3f}" for w, v in found.items()), flush=True)
    counted = sum(int(rate * seconds) for rate in rates) * len(intervals_ms)
    return Measured(numbers, {"seconds": seconds, "payload bytes": 1024}, counted)
