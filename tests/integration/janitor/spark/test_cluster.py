"""A job on a cluster of its own processes, over an instance whose root is on S3."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pyspark
import pytest

import slatemq
from services.janitor.spark.session import java_environment
from slatemq.client import Client
from tests.integration.ingest.server import ROOT
from tests.integration.janitor.runs.janitors import until
from tests.integration.storage.s3_servers import CREDENTIALS, moto, root_url
from tests.ports import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.s3, pytest.mark.proof]  # starts three JVMs

SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
DEPLOY = "org.apache.spark.deploy"

START_S = 240


@asynccontextmanager
async def process(log: Path, *command: str, cwd: Path, **environ: str) -> AsyncIterator[None]:
    """A process whose words are in a log; ended at the end."""
    with log.open("ab") as words:
        started = await asyncio.create_subprocess_exec(
            *command, cwd=cwd, env={**os.environ, **environ}, stdout=words, stderr=words
        )
    try:
        yield
    finally:
        if started.returncode is None:
            started.terminate()
        await asyncio.wait_for(started.wait(), START_S)


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[str]:
    """A standalone master with a worker, as processes that have nothing of ours; its URL."""
    environ = {
        **java_environment(os.environ),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",  # which has a fixed port
        **CREDENTIALS,
    }
    (port,) = free_ports(1)
    url = f"spark://127.0.0.1:{port}"
    places = ("--host", "127.0.0.1", "--port")
    master = (str(SPARK_CLASS), f"{DEPLOY}.master.Master", *places, str(port), "--webui-port", "0")
    worker = (str(SPARK_CLASS), f"{DEPLOY}.worker.Worker", *places, "0", "--webui-port", "0")
    work = ("--work-dir", str(folder / "work"), "--cores", "1", "--memory", "1g", url)
    log = folder / "cluster.log"
    async with (
        process(log, *master, cwd=folder, **environ),
        process(log, *worker, *work, cwd=folder, **environ),
    ):
        await until(lambda: "Registering worker" in log.read_text(), START_S)
        yield url


@asynccontextmanager
async def stack(folder: Path, root: str) -> AsyncIterator[Client]:
    """The whole stack with this root."""
    ready = folder / "ready.json"
    command = (sys.executable, "-m", "services", "--store", root, "--ready-file", str(ready))
    settings = {"SLATEMQ_PURGE_GRACE_S": "0", "SLATEMQ_RETENTION_SCHEDULE": ""}
    async with process(folder / "stack.log", *command, cwd=ROOT, **settings, **CREDENTIALS):
        await until(ready.exists, START_S)
        async with slatemq.connect(json.loads(ready.read_text())["endpoint"]) as client:
            yield client


async def test_a_job_runs_on_a_cluster_that_has_no_code_of_ours_and_over_s3(tmp_path: Path) -> None:
    async with AsyncExitStack() as there:
        root = root_url(there.enter_context(moto()), "clustered")
        client = await there.enter_async_context(stack(tmp_path, root))
        await client.create_queue("orders")
        for retention_s, count in ((1, 30), (3600, 5)):
            message = slatemq.OutgoingMessage(b"x", {"queue": "orders"}, retention_s=retention_s)
            await client.publish_many([message] * count)
        await asyncio.sleep(1.2)
        master = await there.enter_async_context(cluster(tmp_path))

        driver = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.integration.janitor.spark.cluster_driver", root, master),
            "retention",
            cwd=ROOT,
            env={**os.environ, **CREDENTIALS, "SPARK_LOCAL_IP": "127.0.0.1"},
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            out, _ = await driver.communicate()
        finally:
            if driver.returncode is None:
                driver.kill()

        assert driver.returncode == 0
        fields = json.loads(out.splitlines()[-1])
        assert fields["counts"]["messages_purged"] == 30
        # What the tasks ran is what the driver sent.
        assert [place for place in fields["places"] if "slatemq_code.zip" not in place] == []
        assert fields["places"]
        left = [entry async for entry in client.list_entries("orders", "available")]
        assert len(left) == 5
