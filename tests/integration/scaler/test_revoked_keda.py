"""A scaler refuses KEDA once its certificate is revoked, over a real connection."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import pytest

from services.scaler.stubs import externalscaler_pb2
from services.scaler.stubs.externalscaler_pb2_grpc import ExternalScalerStub
from slatemq.cli.access.dev_certificates import Authority
from tests.acceptance.local_stack import REPOSITORY, wait_until
from tests.integration.serving.test_revocations import write_list
from tests.ready_process import popen

KEDA: Final = "slatemq-keda"


@pytest.mark.slow
async def test_kedas_revoked_certificate_is_refused(tmp_path: Path) -> None:
    # Given a scaler with a list that is empty
    authority = Authority(days=1)
    (tmp_path / "ca.crt").write_bytes(authority.pem)
    for name in (KEDA, "127.0.0.1"):
        certificate, key = authority.sign(name, (name,))
        (tmp_path / f"{name}.crt").write_bytes(certificate)
        private = tmp_path / f"{name}.key"
        private.touch(0o600)
        private.write_bytes(key)
    write_list(tmp_path, authority)
    settings = {
        "SLATEMQ_TLS_CA": "ca.crt",
        "SLATEMQ_TLS_CERT": "127.0.0.1.crt",
        "SLATEMQ_TLS_KEY": "127.0.0.1.key",
        "SLATEMQ_TLS_CRL": "crl.pem",
        "SLATEMQ_READY_FILE": "ready.json",
    }
    environ = {name: str(tmp_path / file) for name, file in settings.items()}
    process = popen(
        [sys.executable, "-m", "services.scaler"], cwd=REPOSITORY, env=os.environ | environ
    )
    try:
        ready = tmp_path / "ready.json"
        await asyncio.to_thread(wait_until, ready.exists, 60)
        own = [(tmp_path / f"{KEDA}.{end}").read_bytes() for end in ("key", "crt")]
        credentials = grpc.ssl_channel_credentials(authority.pem, *own)
        address = json.loads(ready.read_text())["address"]
        async with grpc.aio.secure_channel(address, credentials) as channel:
            stub: Any = ExternalScalerStub(channel)
            asked = externalscaler_pb2.ScaledObjectRef(
                scalerMetadata={"queue": "work", "target": "10"}
            )
            # Silent, as the broker is down
            stream = stub.StreamIsActive(asked)
            await asyncio.sleep(0)
            # Behind it on the same connection: the stream is there when this is answered.
            assert (await stub.GetMetricSpec(asked, timeout=60)).metricSpecs

            # When KEDA's certificate is revoked
            write_list(tmp_path, authority, KEDA)

            # Then its connection is refused, and its stream ends
            async def ask_on() -> None:
                while True:
                    await stub.GetMetricSpec(asked, timeout=60)
                    await asyncio.sleep(0.1)

            with pytest.raises(grpc.aio.AioRpcError, match="revoked") as refused:
                await asyncio.wait_for(ask_on(), 60)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            code = await asyncio.wait_for(stream.code(), 60)
            assert code is grpc.StatusCode.UNAUTHENTICATED
    finally:
        process.terminate()
        process.wait(timeout=60)
