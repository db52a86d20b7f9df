"""`python -m libs.serving.healthprobe [HOST:PORT]`: exit 0 if the service there serves, else 1.

For container health checks. Without an address it asks the process that the same environment would
start: SLATEMQ_PORT on loopback.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

DEADLINE_SECONDS = 2.0


def probe(address: str) -> str:
    """Ask for the health of a whole server: empty when it serves, else why it does not."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_SECONDS)
        except grpc.RpcError as error:
            return f"{address}: {error.code().name}"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}"


if __name__ == "__main__":
    default = f"127.0.0.1:{os.environ.get('SLATEMQ_PORT', '')}"
    sys.exit(probe(sys.argv[1] if len(sys.argv) > 1 else default) or 0)
