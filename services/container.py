"""`python -m services.container`: the service that SERVICE names, on the ports of its image.

What images run, so that none needs a shell. The ports are flags, since a variable may be
Kubernetes' own: SLATEMQ_PORT is tcp://… in every pod where a Service is called slatemq.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Final

PORT: Final = ("--port", "7420")
PEER_PORT: Final = ("--peer-port", "7419")

WITHOUT_PEERS: Final = frozenset({"console", "scaler"})
"""They know the instance as clients do, and have no port for services."""


def main() -> None:
    """Run it as `python -m services.SERVICE` does: its settings and exit codes are the same."""
    service = os.environ["SERVICE"]
    peer_port = () if service in WITHOUT_PEERS else PEER_PORT
    sys.argv[1:1] = [*PORT, *peer_port]
    runpy.run_module(f"services.{service}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
