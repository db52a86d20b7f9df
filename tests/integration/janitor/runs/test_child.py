"""The janitor's side of the process that a run has."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading

from uvloop import new_event_loop

from services.janitor.runs.child import Child

SAYS = 'import sys; sys.stdin.readline(); print(\'{"progress": 1}\\n{"end": "done"}\')'


def test_files_opened_after_a_run_stay_open_when_what_it_read_with_is_collected() -> None:
    async def run_and_open() -> None:
        # Given runs that have ended
        for _ in range(3):
            heard: list[object] = []
            end = await Child([sys.executable, "-c", SAYS], heard.append).work({"job": "any"})
            assert (end, heard) == ({"end": "done"}, [{"progress": 1}])
        # When other files get the numbers of its pipes, and the rest of it is collected
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
        gc.collect()
        await asyncio.sleep(0.1)
        # Then those are still open
        for file in files:
            os.close(file)

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run_and_open())


class SlowlyTasked(Child):
    """Its task is written only once the test says so."""

    def __init__(self, command: list[str], heard: list[object]) -> None:
        super().__init__(command, heard.append)
        self.writes, self.may_write = threading.Event(), threading.Event()

    def _send(self, line: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.writes.set()
            self.may_write.wait()
        super()._send(line)


ECHOES = """
import json, sys
print(json.dumps({"heard": sys.stdin.readline()}), flush=True)
print(json.dumps({"end": sys.stdin.readline()}), flush=True)
"""


async def test_a_run_that_is_cancelled_while_its_task_is_written_gets_the_task_first() -> None:
    heard: list[object] = []
    child = SlowlyTasked([sys.executable, "-c", ECHOES], heard)
    work = asyncio.create_task(child.work({"job": "any"}))
    await asyncio.to_thread(child.writes.wait)

    child.cancel()
    child.may_write.set()

    assert await work == {"end": "cancel\n"}
    assert heard == [{"heard": '{"job": "any"}\n'}]
