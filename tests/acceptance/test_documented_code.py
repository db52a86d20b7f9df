"""The Python on the pages runs as it stands there, against a stack of its own."""

import re
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from slatemq.v1 import queue_pb2, queue_pb2_grpc
from tests.acceptance.local_stack import REPOSITORY, LocalStack

pytestmark = pytest.mark.stack

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = (
    "README.md",
    "docs/how-to/commands.md",
    "docs/how-to/publish.md",
    "docs/how-to/stubs.md",
)


def test_the_code_on_the_pages_runs(stack: LocalStack, tmp_path: Path) -> None:
    # Given the queue that the README creates from the command line
    queue = queue_pb2.Queue(queue_id="eu-orders", filter='headers.region == "eu"')
    with grpc.insecure_channel(stack.endpoints["broker"]) as channel:
        queues = queue_pb2_grpc.QueueServiceStub(channel)
        queues.CreateQueue(queue_pb2.CreateQueueRequest(queue=queue), timeout=60)

    for page in PAGES:
        # When the blocks of a page are run as one program, with this stack's address
        blocks = BLOCK.findall((REPOSITORY / page).read_text(encoding="utf-8"))
        program = tmp_path / "page.py"
        program.write_text("\n".join(blocks).replace("127.0.0.1:7420", stack.endpoint))
        ended = subprocess.run(
            [sys.executable, str(program)],
            cwd=REPOSITORY,
            env={"PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

        # Then it comes to its end
        assert ended.returncode == 0, f"{page}: {ended.stderr}"
