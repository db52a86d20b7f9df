"""The pure state machines of a shard: no asyncio, no gRPC, no I/O.

The parts of a queue are rooms of their own: `waiting` (what can be claimed), `lists` (what is
finished, delayed, replayed, redriven), `batches` (commands over many messages).

In reading order; a file imports only files above it:

`commands`          The commands of a shard, in its own words, and their results
`settings`          The settings of a queue, its backoff among them, and their stored form
`owned_queues`      What the queues of each owner add up to: number, and cost of expressions
`leases`            The leases of a queue: its messages in flight, in buckets
`queue`             The state machine of one queue: no I/O, no clock, no asyncio
`changes`           What a shard reports of its changes: nothing, as in direct mode
`lifecycle`         How the records of a queue begin and end
`config_log`        The newest change of each queue's config, in the order of revisions
`lease_table`       The leases of a shard: where each lies, when they end, and how they ended
`moves`             The queues that are on their way to another shard, or from one
`redrives`          Redrives: which dead letters move where, and how far each is
`shard`             The state of one broker shard, and how ranges of logs are applied to it
"""
