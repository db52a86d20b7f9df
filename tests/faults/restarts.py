"""Everything dies at once, wall clocks step, and processes are killed for their memory.

Each process runs in a cgroup of its own, and, where clocks step, under libfaketime (Debian's
package), which steps its wall clock and leaves the monotonic one alone: so do NTP and operators. A
kind of mishap that cannot be had on this machine is left out, with a line that says so.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tests.faults import memory_limits
from tests.faults.memory_limits import MemoryGroup
from tests.faults.mixed_work import SLEWED_MS, Work
from tests.faults.shard_processes import Member
from tests.faults.zombies import run_history

ANSWERS_BETWEEN: Final = 20

STEPS_S: Final = (-3600.0, -5.0, 0.8, 5.0, 3600.0)
STEP_LASTS_S: Final = 8.0
"""Well below the 30 s after which a service follows a step ahead."""

FOLLOWED_S: Final = 1.0
"""A step ahead of less than that is followed at once."""

ROOM_BYTES: Final = 1 << 20
"""How much more a process may take than it has, until it is killed."""

STARVED_S: Final = 5.0
"""When a process that needs no more memory gets less."""

KILLED_S: Final = 120.0

LIBRARIES: Final = tuple(
    f"/usr/lib/{machine}-linux-gnu/faketime/libfaketime.so.1" for machine in ("x86_64", "aarch64")
)

TOGETHER, STEPPED, STARVED = "killed together", "clock stepped", "killed for memory"


def faketime_library() -> str:
    """Where libfaketime is: TESTS_FAKETIME, or of its package; empty where it is not."""
    named = os.environ.get("TESTS_FAKETIME", "")
    return named or next((one for one in LIBRARIES if Path(one).exists()), "")


class MortalMember(Member):
    """A member with a wall clock and a limit of memory of its own, as far as there can be."""

    def __init__(self, folder: Path, service: str, shard: int, *, stepped: bool) -> None:
        super().__init__(folder, service, shard)
        self._clock = folder / f"{self.name}.clock"
        self._library = faketime_library() if stepped else ""
        self.step_clock(0)
        self._group = None if memory_limits.lacking() else MemoryGroup(self.name)

    async def spawn(self, *command: str, **streams: Any) -> Any:
        """Forked unless its clock is to be stepped: libfaketime is loaded as a program starts."""
        if self._library:
            environ = {
                **os.environ,
                "LD_PRELOAD": self._library,
                "FAKETIME_TIMESTAMP_FILE": str(self._clock),
                "FAKETIME_NO_CACHE": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }
            process = await asyncio.create_subprocess_exec(*command, env=environ, **streams)
        else:
            process = await super().spawn(*command, **streams)
        if self._group is not None:
            self._group.limit(None)
            self._group.add(process.pid)
        return process

    def step_clock(self, ahead_s: float) -> None:
        """Its wall clock is so far ahead of the machine's from now on."""
        # In one step, or a process could read half of it.
        new = self._clock.with_suffix(".new")
        new.write_text(f"{ahead_s:+.3f}\n")
        new.rename(self._clock)

    async def starve(self) -> None:
        """Let it take little more memory than it has, until it is killed; start it again."""
        assert self._group is not None
        before = self._group.kills_count
        until_s, room_bytes = time.monotonic() + KILLED_S, ROOM_BYTES
        while True:
            # A kernel may refuse less than is in use: then the limit before holds.
            with suppress(OSError):
                self._group.limit(self._group.usage_bytes + room_bytes)
            try:
                async with asyncio.timeout(STARVED_S):
                    await self.ended()
                break
            except TimeoutError:
                if time.monotonic() > until_s:
                    raise RuntimeError(f"{self.name} lives on in too little memory") from None
            room_bytes -= ROOM_BYTES  # It has enough of what it had before.
        if self._group.kills_count == before:
            raise RuntimeError(f"{self.name} ended by itself: {self.last_words()}")
        await self.start(self.ports)

    async def close(self) -> None:
        await super().close()
        if self._group is not None:
            self._group.close()


def _kinds() -> list[str]:
    """The mishaps that can be had here; says which cannot."""
    kinds = [TOGETHER]
    if faketime_library():
        kinds.append(STEPPED)
    else:
        print("clocks are not stepped: libfaketime is not installed (Debian's package faketime)")
    if reason := memory_limits.lacking():
        print(f"nothing is killed for its memory: {reason}")
    else:
        kinds.append(STARVED)
    return kinds


async def _kill_together(members: Sequence[Member]) -> str:
    """Everything at once; what serves first then is by chance."""
    await asyncio.gather(*(one.end() for one in members))
    await asyncio.gather(*(one.start(one.ports) for one in members))
    return f"{len(members)} members killed at once"


async def _step(members: Sequence[MortalMember], work: Work, random_: random.Random) -> str:
    """The clocks of some step, and back again."""
    step_s = random_.choice(STEPS_S)
    stepped = random_.sample(members, random_.randrange(1, len(members) + 1))
    if 0 < step_s < FOLLOWED_S:
        await work.note_clock(step_s * 1000 + SLEWED_MS)
    for one in stepped:
        one.step_clock(step_s)
    await asyncio.sleep(STEP_LASTS_S)
    for one in stepped:
        one.step_clock(0)
    return f"clocks of {', '.join(one.name for one in stepped)} stepped by {step_s:g} s"


async def run_restarts(
    folder: Path, rounds: int, seed: int, kinds: Sequence[str] = ()
) -> tuple[Work, Counter[str]]:
    """In each round something of each kind; also returns how often each was."""
    random_ = random.Random(seed)
    chosen = kinds or _kinds()
    done: Counter[str] = Counter()
    places = [("ingest", 0), ("ingest", 1), ("broker", 0), ("router", 0)]
    members = [
        MortalMember(folder, service, shard, stepped=STEPPED in chosen) for service, shard in places
    ]

    async def mishaps(work: Work) -> None:
        for number in range(rounds):
            for kind in chosen:
                answered = work.answered_count
                while work.answered_count < answered + ANSWERS_BETWEEN:
                    await asyncio.sleep(0.05)
                began = time.monotonic()
                match kind:
                    case "killed together":
                        what = await _kill_together(members)
                    case "clock stepped":
                        what = await _step(members, work, random_)
                    case _:
                        starved = random_.choice(members[:3])
                        await starved.starve()
                        what = f"{starved.name} killed for its memory"
                done[kind] += 1
                took = time.monotonic() - began
                print(f"round {number}: {what} (took {took:.1f} s)", flush=True)

    work = await run_history(folder, members, members[2], mishaps, seed=seed)
    return work, done
