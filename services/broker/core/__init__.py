"""The pure state machines of a shard: no asyncio, no gRPC, no I/O.

The parts of a queue are rooms of their own: `waiting` (what can be claimed), `leases` (what is in
flight), `lists` (what is finished, delayed, replayed, redriven), `batches` (commands over many
messages).

In reading order; a file imports only files above it:

`backoff`           How long a message waits after a failed attempt
`commands`          The commands of a shard, in its own words, and their results
`settings`          The settings of a queue, and their stored form
`queue`             The state machine of one queue: no I/O, no clock, no asyncio
`changes`           What a shard reports of its changes: nothing, as in direct mode
`lifecycle`         How the records of a queue begin and end
`config_log`        The newest change of each queue's config, in the order of revisions
`lease_grace`       More time for leases after a standstill, given in steps
`lease_table`       The leases of a shard: what claims make, and how they end
`range_application` A range of a log, or a piece of a replay, applied to its queues in steps
`redrives`          Redrives: which dead letters move where, and how far each is
`shard`             The state of one broker shard: all its queues, cursors, leases
"""
