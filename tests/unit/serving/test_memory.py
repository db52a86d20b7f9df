"""The bound on malloc's arenas, rarer looks of the collector, memory returned, and its limit."""

import asyncio
import gc
import itertools
import platform
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest

from libs.serving.process import memory
from libs.serving.process.memory import (
    PAUSE_SHARE,
    STEP_MIN,
    STEP_S,
    collect_in_steps,
    memory_limit_bytes,
)

# Threads that allocate and live at the same time get an arena each, unless there is a bound.
PROGRAM = """
import ctypes, re, sys, threading
from libs.serving.process.memory import bound_arenas
if sys.argv[1] == "bounded":
    assert bound_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
together = threading.Barrier(8)
def work():
    libc.malloc(4096)
    together.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.malloc_stats()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has arenas")
def test_threads_share_two_arenas() -> None:
    def arenas(bound: str) -> int:
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM, bound], capture_output=True, text=True, check=True
        )
        return result.stderr.count("Arena ")

    assert arenas("bounded") <= 2 < arenas("free")


LOOKS = """
import gc, sys
from libs.serving.process.memory import calm_collector, keep_for_good
if sys.argv[1] == "calm":
    calm_collector()
    keep_for_good()
looks = 0
def count(phase, facts):
    global looks
    looks += phase == "start"
gc.callbacks.append(count)
kept = [[] for _ in range(200_000)]
class Ring: pass
weak = []
import weakref
for _ in range(200_000):
    ring = Ring()
    ring.itself = ring
    weak.append(weakref.ref(ring))
print(looks, sum(one() is not None for one in weak))
"""


def test_the_collector_looks_rarely_and_still_finds_what_is_in_cycles() -> None:
    def looked(how: str) -> tuple[int, int]:
        ran = subprocess.run(
            [sys.executable, "-c", LOOKS, how], capture_output=True, text=True, check=True
        )
        looks, alive = map(int, ran.stdout.split())
        return looks, alive

    calm_looks, calm_alive = looked("calm")
    assert calm_looks * 20 < looked("stock")[0]
    assert calm_alive <= 50_000


class Cycle:
    """An object that is in a cycle."""

    def __init__(self) -> None:
        self.itself = self


async def test_what_calls_leave_is_collected_before_it_is_much() -> None:
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1_000_000)  # so that Python looks for nothing by itself
    collecting = asyncio.create_task(collect_in_steps())
    try:
        left = [weakref.ref(Cycle()) for _ in range(STEP_MIN)]
        async with asyncio.timeout(60):
            while any(one() is not None for one in left):
                await asyncio.sleep(0.01)
    finally:
        collecting.cancel()
        gc.set_threshold(*before)


async def test_what_outlived_a_look_is_collected_beside_many_objects_in_use() -> None:
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1_000_000)
    in_use = [Cycle() for _ in range(100_000)]
    of_call = Cycle()
    gc.collect(0)  # while the call goes on
    left = weakref.ref(of_call)
    del of_call
    collecting = asyncio.create_task(collect_in_steps(every_s=0.001))
    try:
        async with asyncio.timeout(240):
            young = []
            while left() is not None:
                if gc.get_count()[0] < STEP_MIN:  # They were looked at.
                    young = [Cycle() for _ in range(STEP_MIN)]
                await asyncio.sleep(0.01)
            del young
    finally:
        collecting.cancel()
        gc.set_threshold(*before)
    assert len(in_use) == 100_000


async def test_a_long_look_is_followed_by_a_long_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = itertools.count(step=0.5)  # Each look takes half a second.
    monkeypatch.setattr(memory, "time", SimpleNamespace(thread_time=lambda: next(readings)))
    monkeypatch.setattr(gc, "get_count", lambda: (STEP_MIN, 0, 0))
    pauses: list[float] = []

    async def note(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 2:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", note)
    with pytest.raises(asyncio.CancelledError):
        await collect_in_steps()
    assert pauses == [STEP_S, 0.5 * PAUSE_SHARE]


PIECES = """
import asyncio, sys
from libs.serving.process.memory import resident_bytes, return_memory
class Ring:
    def __init__(self):
        self.itself = self
        self.buffer = bytes(40_000)
before = resident_bytes()
rings = [Ring() for _ in range(2_000)]
kept = rings[::100]
del rings
async def run():
    returning = asyncio.create_task(return_memory(has_few_objects=True, every_s=0.01))
    async with asyncio.timeout(60):
        while resident_bytes() - before > 20 << 20:
            await asyncio.sleep(0.01)
if sys.argv[1] == "returned":
    asyncio.run(run())
print((resident_bytes() - before) >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps what is free")
def test_what_was_freed_in_pieces_and_in_cycles_is_returned_to_the_system() -> None:
    def kept_mebibytes(how: str) -> int:
        ran = subprocess.run(
            [sys.executable, "-c", PIECES, how], capture_output=True, text=True, check=True
        )
        return int(ran.stdout)

    assert kept_mebibytes("returned") <= 20 < 60 < kept_mebibytes("kept")


CONTAINER = 2 << 30


@pytest.mark.parametrize(
    ("cgroup", "files", "limit"),
    [
        ("0::/\n", {"memory.max": str(CONTAINER)}, CONTAINER),
        ("0::/\n", {"memory.max": "max"}, None),
        (
            "0::/kubepods/pod1/broker\n",
            {
                "kubepods/pod1/broker/memory.max": "max",
                "kubepods/pod1/memory.max": str(CONTAINER),
                "kubepods/memory.max": str(8 * CONTAINER),
            },
            CONTAINER,
        ),
        # In a container that sees its own group alone, under the path of the machine
        ("0::/docker/4f1\n", {"memory.max": str(CONTAINER)}, CONTAINER),
        (
            "7:cpu,cpuacct:/\n4:memory:/docker/4f1\n0::/\n",
            {"memory/memory.limit_in_bytes": str(CONTAINER)},
            CONTAINER,
        ),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("0::/\n", {}, None),
    ],
    ids=["v2", "v2-max", "v2-outer", "v2-container", "v1-container", "v1-unlimited", "no-files"],
)
def test_the_memory_that_a_container_may_take_is_that_of_its_tightest_group(
    tmp_path: Path, cgroup: str, files: dict[str, str], limit: int | None
) -> None:
    process, groups = tmp_path / "self", tmp_path / "cgroup"
    process.mkdir()
    (process / "cgroup").write_text(cgroup)
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text + "\n")

    assert memory_limit_bytes(process, groups) == limit


def test_where_there_are_no_groups_any_amount_may_be_taken(tmp_path: Path) -> None:
    assert memory_limit_bytes(tmp_path, tmp_path) is None
