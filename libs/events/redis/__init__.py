"""Redis as the backend: streams for events, streams or lists for tasks.

=================================  ============================================================
key                                what
=================================  ============================================================
`PREFIX:events`                    stream of events: `type`, `data` (the envelope as JSON)
`PREFIX:tasks`                     tasks as JSON: a stream with the field `task`, or a list
`PREFIX:tasks:delayed`             sorted set of failed tasks by the time of their next attempt
`PREFIX:tasks:processing:NAME`     list of the tasks that consumer NAME holds (lists only)
`PREFIX:tasks:consumers`           sorted set of consumers by last sign of life (lists only)
`PREFIX:dead-letter`               stream of dead letters: `kind` (task or event), `data`
=================================  ============================================================

Redis decides how durable that is: with `appendonly yes` and `appendfsync always` every answered
write survives a power loss; by default the writes of the last second may be lost.

In reading order: `connection` (errors and names), `transactions`, `permissions`, `gathered`,
`streams`, `dead_letters`, `event_stream`, `delayed_tasks`, `stream_tasks`, `list_tasks`, `backend`.
"""
