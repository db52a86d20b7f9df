"""The messages of a queue that can be claimed: lanes of buckets, and the scan of a claim.

In reading order; a file imports only files above it:

`bucket`      A bucket of available messages in memory, and where in it each message stood
`lane_cache`  What of a lane is in memory, and how that goes together with what is read from the
              database
`lane`        A lane: the available messages of one queue that share a priority and a kind, in
              order
`counts`      How many messages of a queue wait, by priority
`orders`      Where the orders of a queue's buckets come from
`scan`        The walk that a claim takes over a queue: which message is next, and what must be
              read first
`time_slots`  Where delayed messages go: into buckets of their time that only one commit writes
`available`   The available messages of one queue: what joins them, and what a claim takes
`lane_budget` How much of all lanes together is in memory: one budget, whatever the number of
              queues
"""
