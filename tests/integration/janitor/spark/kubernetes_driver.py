"""A driver whose executors are pods, in a process of its own as in the janitor's pod.

python -m tests.integration.janitor.spark.kubernetes_driver ROOT URL_OF_KUBERNETES JOB

What else it needs is in the environment, as the manifests say. Prints the job's counts.
"""

from __future__ import annotations

import json
import sys

from services.janitor.jobs.contract import JobOptions
from services.janitor.jobs.run import run_job

# Two executors share one machine here, so their ports cannot be those of the manifests.
FREE_PORTS = dict.fromkeys(
    ("spark.driver.port", "spark.driver.blockManager.port", "spark.blockManager.port"), "0"
)

if __name__ == "__main__":
    root, url, job = sys.argv[1:]
    options = JobOptions(
        master=f"k8s://{url}",
        grace_s=0,
        now_ms=4_000_000_000_000,
        dry_run=True,
        spark={"spark.driver.bindAddress": "127.0.0.1", **FREE_PORTS},
    )
    sys.stdout.write(f"{json.dumps(run_job(job, root, options).counts)}\n")
