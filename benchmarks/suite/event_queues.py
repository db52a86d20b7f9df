"""(k): how long one publish takes in each mode of event queues, on each backend and store.

Callers publish one message after the other and wait for each answer. Beside the first mode of each
backend, in turns, the same is done with the backend's own client alone: a bare XADD, say. All that
was published is then consumed and counted, messages of tasks that were still waiting, too.

On a disk the bare client has a third turn, beside a process that commits as often as an ingest and
a broker do meanwhile: what no program that stores on the same disk can do without.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.suite import servers
from benchmarks.suite.costs import CREDENTIALS, counting_store, store_url
from benchmarks.suite.crew import Consumers, Crew, Failed, new_queue
from benchmarks.suite.servers import NotHere, Server, Starter
from benchmarks.suite.workloads import Measured
from libs.storage.objects.durability import FolderSync

PUT_MS: Final = 100
"""How much longer each write to the slow store takes."""

SIZE_BYTES: Final = 1024
WARM_S: Final = 0.3
"""How long each client process publishes before it counts."""

COMMIT_EVERY_S: Final = 0.05
COMMIT_BYTES: Final = 256 << 10
"""Of a commit beside the bare client: an ingest in `async` mode, and a broker, make ten a second
each; some 5,000 messages of a KiB go by."""

DIRECT, BARE = "direct", "bare"
MODES: Final = (DIRECT, "async", "sync", "write-through", "fire-and-forget")
FILE, SLOW_S3 = "file://", f"S3 with {PUT_MS} ms for a PUT"
STORES: Final = (FILE, SLOW_S3)

_prefixes = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Backend:
    """How one is started and named: `settings` gives the variables of an ingest from its URL."""

    name: str
    start: Starter
    client: str
    settings: Callable[[str], Mapping[str, str]]
    prefixes: tuple[str, ...]

    def environment(self, url: str, mode: str) -> dict[str, str]:
        """The settings of a stack that uses it, under a name that no other stack has used."""
        prefix = f"bench{next(_prefixes)}"
        section = {**self.settings(url), **dict.fromkeys(self.prefixes, prefix)}
        own = {f"SLATEMQ_QUEUE_{self.name.upper()}_{key}": text for key, text in section.items()}
        general = {"ENABLED": "true", "BACKEND": self.name, "CONSISTENCY": mode}
        return own | {f"SLATEMQ_QUEUE_{key}": text for key, text in general.items()}


BACKENDS: Final[dict[str, Backend]] = {
    "redis streams": Backend(
        "redis",
        servers.redis,
        "redis",
        lambda url: {"URL": url, "TASK_STRUCTURE": "streams"},
        ("STREAM_PREFIX",),
    ),
    "redis lists": Backend(
        "redis",
        servers.redis,
        "redis_lists",
        lambda url: {"URL": url, "TASK_STRUCTURE": "lists"},
        ("STREAM_PREFIX",),
    ),
    "rabbitmq": Backend(
        "rabbitmq",
        servers.rabbitmq,
        "rabbitmq",
        lambda url: {"URL": url},
        ("QUEUE_PREFIX", "EXCHANGE"),
    ),
    "activemq": Backend(
        "activemq",
        servers.activemq,
        "activemq",
        lambda url: {"URL": url},
        ("QUEUE_PREFIX",),
    ),
    "kafka": Backend(
        "kafka",
        servers.kafka,
        "kafka",
        lambda url: {"BROKERS": url.removeprefix("kafka://")},
        ("TOPIC_PREFIX",),
    ),
    "slatemq": Backend(
        "slatemq", servers.slatemq, "slatemq", lambda url: {"ENDPOINT": url}, ("QUEUE_PREFIX",)
    ),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """What is measured; `turns` of each, of `seconds`, for each number of `callers`."""

    backends: Sequence[str]
    modes: Sequence[str]
    stores: Sequence[str]
    callers: Sequence[int]
    turns: int
    seconds: float


@dataclass(slots=True)
class Publishing:
    """One queue that is published to; `row` names it in the table."""

    row: str
    server: Server
    queue: str = ""
    beside: Callable[[], AbstractContextManager[None]] = nullcontext
    count: int = 0
    found: dict[tuple[int, str], list[float]] = field(default_factory=dict)
    """By callers and what: one number for each turn."""

    def prepare(self) -> None:
        """Make the queue."""
        (self.queue,) = new_queue(self.server)

    def turn(self, callers: int, seconds: float) -> float:
        """Publish for so long; gives the p99."""
        with self.beside():
            took_s, lasted_s = self._publish(callers, seconds)
        p99_ms = 1000 * took_s[len(took_s) * 99 // 100]
        self.note(callers, "p50 ms", 1000 * took_s[len(took_s) // 2])
        self.note(callers, "p99 ms", p99_ms)
        self.note(callers, "publishes/s", len(took_s) / lasted_s)
        return p99_ms

    def note(self, callers: int, what: str, number: float) -> None:
        """Keep a number of this turn."""
        self.found.setdefault((callers, what), []).append(number)

    def _publish(self, callers: int, seconds: float) -> tuple[list[float], float]:
        crew = Crew(self.server)
        load = {"callers": callers, "seconds": seconds, "warm_s": WARM_S, "size": SIZE_BYTES}
        crew.add("timed", self.queue, 0, first=self.count, **load)
        (result,) = crew.run()
        self.count += result["count"]
        return result["took_s"], result["lasted_s"]

    def check(self) -> int:
        """Consume all that was published; gives how many. Raises Failed for what is missing."""
        crew = Crew(self.server)
        consumers = Consumers(crew, 1, self.queue, self.count, size=SIZE_BYTES, depth=2)
        consumers.check(crew.run())
        return self.count

    def numbers(self) -> dict[str, float]:
        """The medians of the turns, by row, callers, and what."""
        return {
            f"{self.row}, {callers} {'caller' if callers == 1 else 'callers'}, {what}": median(runs)
            for (callers, what), runs in self.found.items()
        }


@contextmanager
def _stack(folder: Path, store: str, settings: Mapping[str, str]) -> Iterator[Server]:
    folder.mkdir(parents=True)
    if store == FILE:
        with servers.slatemq(folder, dict(settings)) as server:
            yield server
        return
    with (
        counting_store(folder, PUT_MS) as port,
        servers.slatemq(folder, {**CREDENTIALS, **settings}, store_url(port)) as server,
    ):
        yield server


@contextmanager
def _committing(folder: Path) -> Iterator[None]:
    """Write files into a folder meanwhile, and sync each as our commits are synced."""
    folder.mkdir(exist_ok=True)
    sync, ended = FolderSync(folder), threading.Event()

    def commit() -> None:
        for number in itertools.count():
            if ended.wait(COMMIT_EVERY_S):
                return
            (folder / str(number)).write_bytes(bytes(COMMIT_BYTES))
            sync.sync_now()

    thread = threading.Thread(target=commit)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@dataclass(slots=True)
class _Run:
    folder: Path
    choice: Choice
    measured: Measured
    places: Iterator[int] = field(default_factory=itertools.count)

    def mode(self, row: str, store: str, settings: Mapping[str, str], bare: Server | None) -> None:
        """One mode, with the backend alone beside it where that is given."""
        choice = self.choice
        with _stack(self.folder / str(next(self.places)), store, settings) as server:
            ours = Publishing(row, server)
            both = [ours]
            if bare is not None:
                name = row.rpartition(" on ")[2]
                both.insert(0, Publishing(f"{store}, {BARE} {name}", bare))
                if store == FILE:
                    commits = partial(_committing, self.folder / "commits")
                    row = f"{store}, {BARE} {name}, beside commits"
                    both.append(Publishing(row, bare, beside=commits))
            for one in both:
                one.prepare()
            for _, callers in itertools.product(range(choice.turns), choice.callers):
                p99s = [one.turn(callers, choice.seconds) for one in both]
                if bare is not None:
                    ours.note(callers, "p99 ÷ bare p99", p99s[1] / p99s[0])
            for one in both:
                self.measured.counted += one.check()
                self.measured.numbers |= one.numbers()
        for what, number in ours.numbers().items():
            print(f"  {what} {number:,.2f}", flush=True)

    def backend(self, name: str) -> None:
        """All modes and stores of one backend."""
        backend = BACKENDS[name]
        missing = servers.client_missing(backend.client)
        if missing:
            raise NotHere(missing)
        place = self.folder / f"backend-{backend.client}"
        place.mkdir()
        with backend.start(place) as running:
            self.measured.settings[name] = running.settings
            for store in self.choice.stores:
                bare: Server | None = replace(running, system=backend.client)
                for mode in (one for one in self.choice.modes if one != DIRECT):
                    settings = backend.environment(running.url, mode)
                    try:
                        self.mode(f"{store}, {mode} on {name}", store, settings, bare)
                        bare = None
                    except NotHere as error:
                        self.left_out(f"{mode} on {name}", error)
                    except Failed as error:
                        self.measured.failures.append(f"{store}, {mode} on {name}: {error}")

    def left_out(self, what: str, error: NotHere) -> None:
        """Keep why something was not measured."""
        why = " ".join(str(error).split()).rpartition("error: ")[2]
        self.measured.settings.setdefault("left out", {})[what] = why
        print(f"  {what}: left out: {why}", flush=True)


def event_queues(folder: Path, choice: Choice) -> Measured:
    """All that was chosen."""
    run = _Run(folder, choice, Measured({}, {"payload bytes": SIZE_BYTES}))
    if DIRECT in choice.modes:
        for store in choice.stores:
            run.mode(f"{store}, {DIRECT}", store, {}, None)
    for name in choice.backends:
        try:
            run.backend(name)
        except NotHere as error:
            run.left_out(name, error)
    return run.measured
