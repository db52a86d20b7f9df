"""The programs on the page of Kafka, run against a real server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from libs.events.backends import open_backend
from tests.integration.events.backends.kafka_server import kafka_server
from tests.integration.events.backends.servers import running
from tests.integration.events.backends.test_conformance import a_task, created
from tests.integration.events.conftest import next_task

pytestmark = [pytest.mark.slow, pytest.mark.proof]  # A group takes seconds to form.

PAGE = Path(__file__).resolve().parents[4] / "docs/how-to/backend-kafka.md"


async def test_the_programs_on_the_page_show_events_and_how_far_a_group_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), shown)
    with running(kafka_server(tmp_path)) as server:
        settings = server.settings("slatemq")
        servers = settings.brokers[0]
        # Given an event, a finished task, and one that waits
        backend = open_backend("kafka")
        await backend.connect(msgspec.structs.replace(settings, partitions=1))
        await backend.publish(created("holiday"))
        for _ in range(2):
            await backend.enqueue_task(a_task())
        await backend.complete_task((await next_task(backend)).task_id)
        await backend.close()

        # When the programs are run, then they tell of them
        await shown["read"]("slatemq.object.created", "billing", 1, servers)
        assert '"key":"holiday"' in capsys.readouterr().out
        await shown["lag"]("slatemq.object.created", "billing", servers)
        assert capsys.readouterr().out == "slatemq.object.created 0: 1 of 1\n"
        await shown["lag"]("slatemq.tasks", f"{settings.consumer_group}.tasks", servers)
        # Tansu's ends of topics lag behind.
        assert capsys.readouterr().out.startswith("slatemq.tasks 0: 1 of ")
