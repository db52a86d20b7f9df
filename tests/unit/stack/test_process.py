"""The supervisor over real processes."""

import asyncio
import errno
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from libs.serving.process.exits import EXIT_FENCED, EXIT_STORE_DOWN, EXIT_USAGE
from services.stack.ports import choose_ports
from services.stack.process import STARTS_MAX, Backoff, Program, Supervised
from tests.integration.waiting import WAIT_SECONDS

PROGRAM = Path(__file__).with_name("health_program.py")

pytestmark = [
    pytest.mark.slow,  # Each start of Python with gRPC takes a third of a second.
    pytest.mark.filterwarnings("ignore:.*child watcher.*:DeprecationWarning"),
]


class Watched:
    """A supervised program, with all that was said about it.

    Attributes:
        problem: What goes wrong each time that it serves.
    """

    def __init__(self, folder: Path, lives: str, log: str = "it.log") -> None:
        (port,) = choose_ports(None, ["it"]).values()
        self.said: list[str] = []
        self.reports: asyncio.Queue[str] = asyncio.Queue()
        self.served = asyncio.Semaphore(0)
        self.problem: OSError | None = None
        self.log = folder / log
        command = [sys.executable, str(PROGRAM), str(port), lives, str(folder)]
        program = Program("it", command, f"127.0.0.1:{port}", dict(os.environ), self.log)
        self.it = Supervised(program, self._report, self._on_serving, Backoff(0.01, 0.02))

    async def until_said(self, words: str) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while words not in await self.reports.get():
                pass

    async def until_served(self) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            await self.served.acquire()

    def kill(self) -> None:
        assert self.it.pid is not None
        os.kill(self.it.pid, signal.SIGKILL)

    def _report(self, line: str) -> None:
        self.said.append(line)
        self.reports.put_nowait(line)

    def _on_serving(self) -> None:
        self.served.release()
        if self.problem is not None:
            raise self.problem


@pytest.fixture
async def watch(tmp_path: Path) -> AsyncIterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def watching(lives: str, log: str = "it.log") -> Watched:
        made.append(Watched(tmp_path, lives, log))
        return made[-1]

    yield watching
    for each in made:
        await each.it.stop(0, asyncio.Event())


async def test_the_last_words_of_an_earlier_run_are_not_taken_for_those_of_this_one(
    tmp_path: Path, watch: Callable[[str], Watched]
) -> None:
    (tmp_path / "it.log").write_text("stopped: SIGTERM\n")
    watched = watch("serve")
    assert watched.it.last_words == ""
    with watched.log.open("a") as log:
        log.write("serving\n")
    assert watched.it.last_words == "\n    serving"


async def test_a_killed_process_is_started_again_on_its_port(
    watch: Callable[[str], Watched],
) -> None:
    watched = watch("serve")
    watched.it.start()
    await watched.served.acquire()
    first = watched.it.pid
    assert first is not None

    os.kill(first, signal.SIGKILL)
    await watched.served.acquire()

    assert watched.it.pid not in (first, None)
    assert watched.said == [
        "it was killed by SIGKILL; starting it again in 0.01 s",
        "it is serving again",
    ]


async def test_a_process_that_fails_at_first_is_tried_again_with_its_last_words_reported(
    watch: Callable[[str], Watched],
) -> None:
    watched = watch("1,1,serve")
    watched.it.start()

    await watched.served.acquire()

    assert watched.said == [
        "it ended (exit 1); starting it again in 0.01 s\n    asked to end with 1",
        "it ended (exit 1); starting it again in 0.02 s\n    asked to end with 1",
        "it is serving again",
    ]


async def test_a_process_that_never_serves_is_given_up_after_some_lives_not_after_some_time(
    watch: Callable[[str], Watched],
) -> None:
    watched = watch("1")

    await watched.it.start()

    assert watched.it.refused == 1
    assert len(watched.said) == STARTS_MAX
    last = f"it ended (exit 1), {STARTS_MAX} times before it served\n    asked to end with 1"
    assert watched.said[-1] == last


async def test_a_process_whose_store_is_down_is_started_again_until_it_serves(
    watch: Callable[[str], Watched],
) -> None:
    # Given a store that is down for longer than other failures may last
    watched = watch(",".join([str(EXIT_STORE_DOWN)] * (STARTS_MAX + 2) + ["serve"]))

    watched.it.start()
    await watched.served.acquire()

    assert watched.it.refused is None
    assert watched.said[0] == "it cannot use its store (exit 75); starting it again in 0.01 s"
    assert watched.said[-1] == "it is serving again"


async def test_a_process_that_has_served_is_started_again_however_often_it_ends(
    watch: Callable[[str], Watched],
) -> None:
    watched = watch(",".join(["serve", *["1"] * STARTS_MAX, "serve"]))
    watched.it.start()
    await watched.served.acquire()
    assert watched.it.pid is not None

    os.kill(watched.it.pid, signal.SIGKILL)
    await watched.served.acquire()

    assert watched.said[-1] == "it is serving again"


async def test_a_process_that_cannot_be_started_again_is_tried_until_it_can_be(
    watch: Callable[[str, str], Watched],
) -> None:
    # Given that the folder of its log is removed while it serves
    watched = watch("serve", "logs/it.log")
    watched.log.parent.mkdir()
    watched.it.start()
    await watched.until_served()
    shutil.rmtree(watched.log.parent)

    # For longer than one that never served is tried
    watched.kill()
    for _ in range(STARTS_MAX + 1):
        await watched.until_said("it cannot be started: [Errno 2] No such file or directory")
    watched.log.parent.mkdir()

    await watched.until_served()
    assert watched.it.refused is None
    assert watched.said[-1] == "it is serving again"


async def test_a_process_that_cannot_be_started_at_first_fails_at_once(
    watch: Callable[[str, str], Watched],
) -> None:
    watched = watch("serve", "logs/it.log")

    with pytest.raises(FileNotFoundError):
        await watched.it.start()

    assert watched.said == []


async def test_a_process_is_started_again_although_that_it_serves_was_not_recorded(
    watch: Callable[[str], Watched],
) -> None:
    # Given a second life that no file has the process ID of
    watched = watch("serve")
    watched.it.start()
    await watched.until_served()
    watched.problem = OSError(errno.ENOSPC, "No space left on device")
    watched.kill()
    await watched.until_served()

    watched.problem = None
    watched.kill()

    await watched.until_served()
    assert watched.said == [
        "it was killed by SIGKILL; starting it again in 0.01 s",
        "it is serving again",
        "it is serving, but recording that failed: [Errno 28] No space left on device",
        "it was killed by SIGKILL; starting it again in 0.02 s",
        "it is serving again",
    ]


@pytest.mark.parametrize(
    ("code", "why"), [(EXIT_FENCED, "was fenced"), (EXIT_USAGE, "refused to start")]
)
async def test_a_fenced_or_misconfigured_process_is_never_started_again(
    code: int, why: str, watch: Callable[[str], Watched]
) -> None:
    watched = watch(f"{code},serve")

    await watched.it.start()

    assert watched.it.refused == code
    assert watched.it.pid is None
    assert len(watched.said) == 1
    assert why in watched.said[0]


async def test_a_stopped_process_drains_and_is_not_started_again(
    watch: Callable[[str], Watched],
) -> None:
    watched = watch("serve")
    run = watched.it.start()
    await watched.served.acquire()

    assert await watched.it.stop(60, asyncio.Event()) is True

    assert run.done()
    assert watched.it.pid is None
    assert watched.said == []


async def test_a_process_that_does_not_end_is_killed_after_the_grace(
    watch: Callable[[str], Watched],
) -> None:
    watched = watch("stubborn")
    watched.it.start()
    await watched.served.acquire()

    assert await watched.it.stop(0.05, asyncio.Event()) is False

    assert watched.it.pid is None
    assert watched.said == ["it did not end in time and is killed"]
