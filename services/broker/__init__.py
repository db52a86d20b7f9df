"""The broker: owns the queues of one shard, and every lease on their messages.

The pure core, in the order in which to read it:

`queue_settings`  what a queue's owner may set
`waiting_buckets` one record of available messages
`lanes`           the available messages of one priority and kind, of which memory holds a prefix
`timed_buckets`   the buckets that delayed messages are added to
`lane_budget`     how much of all lanes together is in memory
`walks`           the way of a claim over the lanes of one priority
`available`       all lanes of a queue
`lease_buckets`   leases that share a record, of a large claim as columns
`leases`          the messages in flight, when they end, and what became of those that are not
`queue_machine`   one queue: what each command does to its messages
`queue_lifecycle` how the records of a queue begin and end
`attempts`        the failed attempts of messages
`commands`        what a shard is told, and how it answers
`config_log`      the newest change of each queue's config, for routers and watchers
`replays`         how far queues that start in the past have caught up
`outbox`          pushes on their way to the ingests: their numbers
`executed`        which lists of commands took effect lately
`range_application` ranges of logs, brought into their queues in steps
`storable`        records that cannot be encoded, found before a command changes anything
`shard_machine`   all queues of the shard, cursors; what goes into a commit
`executions`      lists of commands that take effect together
`loading`         the way back from the database: the state at start, cold buckets on demand
"""
