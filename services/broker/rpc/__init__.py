"""One servicer for each gRPC service, or for a part of one.

In reading order; a file imports only files above it:

`assignment`  AssignmentService: the calls of routers
`consumer`    ConsumerService: claims, and what becomes of them
`delayed`     DelayedService: delayed messages, watched and edited
`entries`     EntryService: entries listed, found, cancelled and rescheduled
`outbox`      OutboxService: what waits for the ingests, and what they refused permanently
`queue_names` QueueNameService: whether this shard needs a queue's name that another one wants
`queues`      QueueService: queues and their settings
`redrives`    DeadLetterService: redrives, and settlements of single dead letters
`removals`    RemovalService: what the janitor found out may go, and archived dead letters that
              come back
`servicers`   All servicers of a broker, built when its shard is open, and registered together
"""
