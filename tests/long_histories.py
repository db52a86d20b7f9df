"""Histories of any length without a fault, as clients of mixed work write them.

`python -m tests.long_histories MESSAGES` writes one, has `python -m tests.judge` judge it in a
process of its own, and prints how much memory and processor time that took. `--keep FILE` keeps it.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

BATCH: Final = 20
"""Messages of a publish."""

ROUND_MS: Final = 50
"""From one publish to the next: 400 messages a second."""

REDRIVEN: Final = 50
"""Rounds from a redrive to the next; every fifth of them is between two pauses."""

LEASE_MS: Final = 4000
MS: Final = 1_000_000

FILTERS: Final = {
    "all": 'headers.kind != "other"',
    "even": 'headers.parity == "even" && headers.kind == "plain"',
    "third": 'headers.class in ["0", "3"]',
    "orders": 'headers.kind == "order"',
    "shipped": 'headers.kind == "shipped"',
    "fragile": 'headers.kind == "fragile"',
}


def long_history(messages_count: int) -> Iterator[dict[str, Any]]:
    """The lines, of at least this many messages."""
    clients = _Clients()
    yield from clients.begin()
    for turn in range(-(-messages_count // BATCH)):
        yield from clients.round(turn)
    yield from clients.round(None)
    yield from clients.round(None)
    yield from clients.end()


class _Clients:
    """Clients whose calls take 2 ms each, of a broker whose clock is theirs."""

    def __init__(self) -> None:
        self._now_ms = 0
        self._ids = 0
        self._waiting: dict[str, list[tuple[str, int, int, dict[str, str]]]] = {
            queue: [] for queue in FILTERS
        }
        self._dead: list[tuple[str, int, int, dict[str, str]]] = []
        self._redriven: set[str] = set()

    def begin(self) -> Iterator[dict[str, Any]]:
        for queue, text in FILTERS.items():
            attempts = 2 if queue == "fragile" else 1000
            asked = {"queue": queue, "filter": text, "max_attempts": attempts, "partitions": 1}
            yield from self._call("main", "create-queue", asked)

    def round(self, turn: int | None) -> Iterator[dict[str, Any]]:
        """A publish and what consumers do with it; None: consumers alone."""
        until_ms = self._now_ms + ROUND_MS
        if turn is not None:
            yield from self._publish()
        for queue in ("all", "even", "third"):
            yield from self._consume(queue, nacked=25)
        if turn is not None and turn % (REDRIVEN // 5) == 0:
            yield from self._call("editor", "pause", {"queue": "third"})
            yield from self._call("editor", "resume", {"queue": "third"})
        yield from self._ship()
        yield from self._consume("shipped", nacked=0)
        yield from self._consume("fragile", nacked=2)
        if turn is not None and turn % REDRIVEN == 0:
            moved, self._dead = self._dead, []
            self._waiting["fragile"] += moved
            self._redriven = {key for key, *_ in moved}
            asked = {"queue": "fragile"}
            yield from self._call("operator", "redrive", asked, {"moved_count": len(moved)})
        self._now_ms = max(self._now_ms, until_ms)

    def end(self) -> Iterator[dict[str, Any]]:
        for queue in FILTERS:
            dead = self._dead if queue == "fragile" else []
            left = [{"id": one[1], "attempt": 2, "reason": "attempts exhausted"} for one in dead]
            yield from self._call("main", "drain", {"queue": queue}, {"dead": left})

    def _publish(self) -> Iterator[dict[str, Any]]:
        messages, ids = [], []
        for _ in range(BATCH):
            self._ids += 1
            number = self._ids
            kind = {0: "order", 1: "order", 2: "fragile", 3: "other"}.get(number % 19, "plain")
            parity = "odd" if number % 2 else "even"
            headers = {"kind": kind, "class": str(number % 7), "parity": parity}
            key = f"m{number}"
            messages.append({"key": key, "headers": headers, "digest": _digest(key)})
            ids.append(number)
            for queue in _queues(headers):
                self._waiting[queue].append((key, number, 1, headers))
        yield from self._call("producer", "publish", {"messages": messages}, {"ids": ids})

    def _claim(self, queue: str) -> Iterator[dict[str, Any]]:
        """The lines, and in `claimed` what came."""
        self.claimed, self._waiting[queue] = self._waiting[queue][:100], self._waiting[queue][100:]
        deadline_ms = self._now_ms + 1 + LEASE_MS
        came = [
            {
                "key": key,
                "digest": _digest(key),
                "headers": headers,
                "id": number,
                "attempt": attempt,
                "token": f"{queue}:{number:016x}:{attempt:04x}:{deadline_ms:016x}",
                "deadline_ms": deadline_ms,
            }
            for key, number, attempt, headers in self.claimed
        ]
        self.tokens = [str(one["token"]) for one in came]
        asked = {"queue": queue, "max": 100, "lease_ms": LEASE_MS, "wait_ms": 1000}
        yield from self._call(f"consumer-{queue}", "claim", asked, {"messages": came})

    def _consume(self, queue: str, nacked: int) -> Iterator[dict[str, Any]]:
        """Ack all but each so-manieth message; 0: all."""
        yield from self._claim(queue)
        acked, given_back = [], []
        for (key, number, attempt, headers), token in zip(self.claimed, self.tokens, strict=True):
            if not nacked or number % nacked or key in self._redriven:
                acked.append(token)
                continue
            given_back.append(token)
            if queue == "fragile" and attempt == 2:
                self._dead.append((key, number, 1, headers))
            elif queue == "fragile" or attempt == 1:
                self._waiting[queue].append((key, number, attempt + 1, headers))
            else:
                acked.append(given_back.pop())
        yield from self._done(f"consumer-{queue}", "nack", given_back, {"delay_ms": 0})
        yield from self._done(f"consumer-{queue}", "ack", acked, {})

    def _ship(self) -> Iterator[dict[str, Any]]:
        """Complete each order and push two messages for it."""
        yield from self._claim("orders")
        if not self.claimed:
            return
        commands: list[dict[str, Any]] = [{"do": "complete", "token": one} for one in self.tokens]
        for key, *_ in self.claimed:
            for part in "ab":
                pushed = f"{key}/{part}"
                digest = _digest(pushed)
                push = {"do": "push", "queue": "shipped", "key": pushed, "digest": digest}
                commands.append(push)
                self._ids += 1
                self._waiting["shipped"].append((pushed, self._ids, 1, {}))
        yield from self._call("worker", "execute", {"commands": commands})

    def _done(
        self, process: str, f: str, tokens: Sequence[str], more: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        if tokens:
            results = ["ok"] * len(tokens)
            yield from self._call(process, f, {"tokens": tokens, **more}, {"results": results})

    def _call(
        self, process: str, f: str, value: dict[str, Any], result: dict[str, Any] | None = None
    ) -> Iterator[dict[str, Any]]:
        for kind, said in (("invoke", value), ("ok", result or {})):
            self._now_ms += 1
            line = {"time": self._now_ms * MS, "process": process, "type": kind, "f": f}
            yield {**line, "value": said}


def _queues(headers: dict[str, str]) -> Iterator[str]:
    kind = headers["kind"]
    if kind != "other":
        yield "all"
    if headers["parity"] == "even" and kind == "plain":
        yield "even"
    if headers["class"] in "03":
        yield "third"
    if kind in ("order", "fragile"):
        yield {"order": "orders", "fragile": "fragile"}[kind]


def _digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()[:16]


def write(file: Path, messages_count: int) -> None:
    with file.open("w", encoding="utf-8") as out:
        for line in long_history(messages_count):
            out.write(json.dumps(line, separators=(",", ":")) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.long_histories",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("messages", type=int)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep the history in this file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slatemq-history-") as folder:
        file = given.keep or Path(folder) / "history.jsonl"
        write(file, given.messages)
        done = subprocess.run([sys.executable, "-m", "tests.judge", str(file)], check=False)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        size_mib, peak_mib = file.stat().st_size >> 20, used.ru_maxrss >> 10
        print(
            f"{size_mib} MiB of history: {peak_mib} MiB of memory at most, "
            f"{used.ru_utime + used.ru_stime:.0f} s of processor time"
        )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
