"""A job to which the cluster gives no executor."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.integration.ingest.server import ROOT
from tests.integration.janitor.instances import instance

pytestmark = [pytest.mark.slow, pytest.mark.proof]
"""It starts a Java. Its short form is the test of how long tasks wait (tests/unit/janitor)."""

END_S = 240
"""So long nothing is waited for but a hang."""


async def test_a_job_that_gets_no_executor_fails_and_names_its_master(tmp_path: Path) -> None:
    async with instance(tmp_path) as made:
        await made.client.create_queue("orders", filter='headers.queue == "orders"')
        await made.publish("orders", 3, retention_s=1)
        await made.routed()
        driver = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.integration.janitor.spark.stranded_driver"),
            *(made.url, "retention"),
            cwd=ROOT,
            env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"},
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, _ = await asyncio.wait_for(driver.communicate(), END_S)
        finally:
            if driver.returncode is None:
                os.killpg(driver.pid, 9)

    assert driver.returncode == 0
    why = out.decode().splitlines()[-1]
    assert "executor" in why
    assert "local-cluster[1,1,1024]" in why
