"""The services of SlateMQ, each a process of its own, and the local stack that runs them all.

`ingest`   accepts and stores messages     `router`  judges them by the filters of all queues
`broker`   owns queues and leases          `janitor` runs jobs over snapshots with Spark
`console`  pages for people                `scaler`  answers KEDA how much work queues have
`stack`    all of them on one machine      `container` what images run: one of them
"""

import os

# What follows is read when gRPC is imported; a value that is already set stays.

# gRPC has lines of its own for what is no fault, such as the end of an idle connection: they would
# stand between those of our logs, of which each is one object with --log-format json.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# gRPC reads sockets in threads of its own and hands what they give to the thread that asyncio waits
# for. Without that hop a message costs a fifth less (docs/decisions/0018-publish-streams.md).
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
