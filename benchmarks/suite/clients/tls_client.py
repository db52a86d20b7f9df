"""SlateMQ with TLS, and with a token where the URL has one."""

from __future__ import annotations

from urllib.parse import urlsplit

import slatemq
from benchmarks.suite.clients import slatemq_client


class Client(slatemq_client.Client):
    """One connection; `url` is slatemqs://TOKEN@HOST:PORT/FILE, the file being the authority's."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        credentials = slatemq.Credentials(ca=parts.path, token=parts.username or "")
        self._client = slatemq.connect(parts.netloc.rpartition("@")[2], credentials=credentials)
