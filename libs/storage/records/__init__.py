"""The values of the records, one kind per module.

In reading order; a file imports only files above it:

`queues`             The values of a queue's lists: a bucket of active, done or failed messages,
                     and attempts
`archived_records`   The value of an archived row: dead letters whose content was moved into the
                     archive
`configs`            The value of a queue's config record
`dedupe_records`     What is known of dedupe keys: a row for each key, and rows that tell which
                     ones end when
`delayed_records`    The value of a delayed record: the delayed messages that one commit has routed
                     to a queue
`event_cursor`       The value of an event cursor record: how far the events of a log are published
`event_records`      The values of the records of events that wait to be published, and of their
                     counter
`log_runs`           Runs: messages of a log entry that follow one another and are alike
`metadata`           The metadata of published messages: the RFC's record value, and the log entry
                     that packs them
`log_parts`          Log entries in parts: reading a long one takes longer than an event loop may be
                     held up
`payloads`           The value of a payload record
`states`             The values of our own records, key types 0x40 and up, except the ID block (see
                     ids.py)
`execution_records`  The values of what executed commands leave behind: pushes on their way, and
                     request IDs
`log_bounds`         The value of a log bounds record: what the log's own rows no longer tell once
                     some are removed
`log_gaps`           The value of a log gaps record: where a log's IDs jump, as a restart of its
                     ingest skips some
`payload_packs`      Payloads of one log entry that are stored together: a put costs far more than
                     a small payload
`redrive_records`    The value of a redrive: which dead letters it moves where, and how far it is
`refused_pushes`     The value of a refused push: a row of a broker's outbox that an ingest will
                     never take as it is
`replay_records`     The value of a queue's replay: how far the logs from before its creation are
                     brought in
`task_records`       The value of a task record: what became of a write task, which is applied once
                     because of it
"""
