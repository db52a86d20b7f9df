"""The alert of a certificate that expires fires for a real service, and ends when it is renewed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from slatemq.cli.access.dev_certificates import make_certificates
from tests.integration.observability.prometheus_server import prometheus
from tests.integration.observability.scraped_stack import ended, firing
from tests.integration.stack.processes import Service

pytestmark = [pytest.mark.stack, pytest.mark.slow]

EXPIRES = ("SlateMQCertificateExpires", "ingest")


async def test_an_alert_fires_while_a_certificate_expires_within_a_week(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "certificates"
    make_certificates(folder, days=6)
    for name, file in {"CA": "ca.crt", "CERT": "service.crt", "KEY": "service.key"}.items():
        monkeypatch.setenv(f"SLATEMQ_TLS_{name}", str(folder / file))
    ingest = Service(tmp_path, "ingest", "--http-port", "0")
    try:
        await ingest.start()
        await asyncio.to_thread(_renew, tmp_path, folder, ingest.http_address)
    finally:
        await ingest.close()


def _renew(root: Path, folder: Path, address: str) -> None:
    ca = folder / "ca.crt"
    with prometheus(root / "prometheus", {"ingest": address}, ca) as server:
        firing(server, EXPIRES)

        folder.rename(root / "old")
        make_certificates(folder, days=8)
        ended(server, EXPIRES)
