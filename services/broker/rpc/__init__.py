"""One servicer for each gRPC service, or for a part of one.

In reading order; a file imports only files above it:

`assignment`  AssignmentService: what routers tell the broker
`consumer`    ConsumerService: claims, and what becomes of them
`delayed`     The part of EntryService for those who watch and edit delayed messages
`redrives`    The part of EntryService for dead letters: redrives, and settling single ones
`entries`     EntryService: looks at entries, finds them, repairs them, and moves dead letters
`outbox`      OutboxService: what waits for the ingests, and what they refused for good
`queue_names` QueueNameService: whether this shard needs a queue's name that another one wants
`queues`      QueueService: queues and their settings
`removals`    RemovalService: what the janitor found out may go, and archived dead letters that
              come back
"""
