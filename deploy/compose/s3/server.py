"""An S3 server to try SlateMQ with: moto's. Its objects are in memory, and go with it."""

from __future__ import annotations

import logging
import signal
from typing import Final
from urllib.request import Request, urlopen

from moto.server import ThreadedMotoServer

PORT: Final = 5000
BUCKET: Final = "slatemq"

ENDS: Final = {signal.SIGTERM, signal.SIGINT}


def main() -> None:
    """Serve a bucket until SIGTERM or SIGINT."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)  # Before there are other threads.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("0.0.0.0", PORT, verbose=False)
    server.start()
    with urlopen(Request(f"http://127.0.0.1:{PORT}/{BUCKET}", method="PUT")):
        pass
    signal.sigwait(ENDS)
    server.stop()


if __name__ == "__main__":
    main()
