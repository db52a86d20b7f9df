"""One servicer for each gRPC service, or for a part of one.

In reading order; a file imports only files above it:

`dead_letter_rows` Dead letters as requests name them: by the rows that list them, in a queue of
              one revision
`archived`    ArchivedService: archived dead letters brought back, or dropped
`arrivals`    ArrivalService: queues that arrive from other shards
`assignment`  AssignmentService: the calls of routers
`consumer`    ConsumerService: claims, and what becomes of them
`entries`     EntryService and DelayedService: entries listed, found, changed, watched, edited
`moves`       MoveService: queues that operators move to other shards
`outbox`      OutboxService: what waits for the ingests, and what they refused permanently
`queues`      QueueService and QueueNameService: queues, their settings, and who uses their names
`redrives`    DeadLetterService: redrives, and settlements of single dead letters
`removals`    RemovalService: what jobs of the janitor found expired or archived
"""
