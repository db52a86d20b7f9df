"""A pod that was replaced, and whose kubelet starts it again and again, leaves the shard alone."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from libs.serving.process.exits import EXIT_FENCED
from tests.acceptance.local_stack import REPOSITORY, wait_until
from tests.ready_process import popen

pytestmark = [pytest.mark.slow]  # Each life of a pod is a process.


class Pod:
    """One pod of a broker's StatefulSet: a name that lasts, and one container after the other."""

    def __init__(self, folder: Path, uid: str) -> None:
        self._folder, self._uid = folder, uid
        self._lives_count = 0
        self.container: Any = None

    def start(self) -> None:
        """Start the container once more."""
        self._lives_count += 1
        self._ready = self._folder / f"{self._uid}-{self._lives_count}.json"
        command = [sys.executable, "-m", "services.broker", "--owner-name", self._uid]
        root = (self._folder / "data").as_uri()
        self.container = popen(
            [*command, "--root", root, "--ready-file", str(self._ready)],
            cwd=REPOSITORY,
            stderr=subprocess.DEVNULL,
        )

    def serve(self) -> None:
        self.start()
        wait_until(self._ready.exists, 60)

    def end(self) -> int:
        code: int = self.container.wait(timeout=60)
        return code


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[list[Pod]]:
    made = [Pod(tmp_path, uid) for uid in ("first", "second", "third")]
    yield made
    for pod in made:
        if pod.container is not None and pod.container.poll() is None:
            pod.container.kill()
            pod.container.wait(timeout=60)


def test_a_replaced_pod_that_is_started_again_does_not_take_its_shard_back(
    pods: list[Pod],
) -> None:
    first, second, third = pods
    # Given a pod on a node that is cut off, and the one that the StatefulSet made in its place
    first.serve()
    second.serve()
    assert first.end() == EXIT_FENCED

    # When its kubelet starts it again, then it ends each time, and the second one goes on
    for _ in range(3):
        first.start()
        assert first.end() == EXIT_FENCED
    assert second.container.poll() is None

    # And when the second is killed, then it alone comes back, at once
    second.container.kill()
    second.end()
    first.start()
    assert first.end() == EXIT_FENCED
    second.serve()

    # And a pod that is new takes the shard from both
    third.serve()
    assert second.end() == EXIT_FENCED
    for pod in (first, second):
        pod.start()
        assert pod.end() == EXIT_FENCED
    assert third.container.poll() is None
