"""The messages of a queue that can be claimed: lanes of buckets, and the walk of a claim.

In reading order; a file imports only files above it:

`bucket`          A bucket of available messages in memory, and where in it each message stood
`lane`            A lane: the available messages of one queue that share a priority and a kind, in
                  order
`orders`          Where the orders of a queue's buckets come from
`scan`            The walk of a claim over a queue: which message is next, and what must be read
                  first
`delayed_journal` The journal of delayed messages, read by the watchers of a queue
`available`       The available messages of one queue: how they join it, what a claim takes, and
                  what expires
`lane_budget`     How much of all lanes together is in memory: one budget for any number of queues
"""
