"""One servicer for each gRPC service, or for a part of one.

In reading order; a file imports only files above it:

`assignment`  AssignmentService: the calls of routers
`consumer`    ConsumerService: claims, and what becomes of them
`entries`     EntryService and DelayedService: entries listed, found, changed, watched, edited
`outbox`      OutboxService: what waits for the ingests, and what they refused permanently
`queues`      QueueService and QueueNameService: queues, their settings, and who uses their names
`redrives`    DeadLetterService: redrives, and settlements of single dead letters
`removals`    RemovalService: what the janitor found out may go, and archived dead letters that
              come back
"""
