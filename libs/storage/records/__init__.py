"""The values of the records, one kind in each module.

Encoders raise ValueError naming the field that does not fit, decoders CorruptRecord.

In reading order; a file imports only files above it:

`queues`             The values of a queue's lists: a bucket of active, done or failed messages,
                     and attempts
`archived_records`   The value of an archived row: dead letters whose content is in the archive
`configs`            The value of a queue's config record
`dedupe_records`     Dedupe keys: a row for each, and rows of those that end in the same minute
`delayed_records`    The delayed messages that one commit has routed to a queue
`event_records`      Events that wait to be published, and how far those of a log are
`log_runs`           Runs: messages of a log entry that follow one another and share metadata
`metadata`           The metadata of published messages, and the log entries that pack them
`log_parts`          Log entries in parts, as reading a long one would hold up an event loop
`payloads`           The value of a payload record
`states`             The state of a queue, and values of a few numbers; the ID block is in ids.py
`execution_records`  What executed commands leave: pushes, sent or refused, and request IDs
`log_bounds`         Where a log begins and ends, and where its IDs jump
`payload_packs`      Small payloads of one log entry that are stored together
`redrive_records`    A redrive: which dead letters it moves, to where, and its progress
`replay_records`     The progress of a queue's replay of the logs from before its creation
`move_records`       A queue on its way to another broker shard, as each of the two has it
`task_records`       The outcome of a write task, which makes it apply once
`catalogue`          Every kind of record: its databases, the parser of its key, its decoder
"""
