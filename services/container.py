"""`python -m services.container`: the service that SERVICE names, on the ports of its image.

`python -S -E services/container.py probe` checks its health there: exit 0 if it serves, else 1.

What images run, so that none needs a shell. The ports are flags, since a variable may be
Kubernetes' own: SLATEMQ_PORT is tcp://… in every pod where a Service is called slatemq. This
imports as little as it can, since the probe runs every few seconds.
"""

from __future__ import annotations

import os
import sys

PORT = "7420"
PEER_PORT = "7419"

WITHOUT_PEERS = frozenset({"console", "scaler"})
"""They know the instance as clients do, and have no port for services."""

PROBE = "libs/serving/process/healthprobe.py"


def main() -> None:
    """Run it as `python -m services.SERVICE` does: its settings and exit codes are the same."""
    service = os.environ["SERVICE"]
    if sys.argv[1:] == ["probe"]:
        sys.argv[1:] = [f"{'http://' if service == 'console' else ''}127.0.0.1:{PORT}"]
        with open(PROBE, encoding="utf-8") as source:
            exec(source.read(), {"__name__": "__main__"})
        return
    # Not for the probe, which would take twice as long with these.
    import runpy
    import signal

    # Linux keeps signals without a handler from PID 1, which this is until a service has its own.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    peer_port = () if service in WITHOUT_PEERS else ("--peer-port", PEER_PORT)
    sys.argv[1:1] = ["--port", PORT, *peer_port]
    runpy.run_module(f"services.{service}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
