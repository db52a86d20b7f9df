"""Event queues, as every process has them. Loaded where they are on.

In reading order; a file imports only files above it:

`outbox`   Events of changes as rows of the shard's own database, in the batches of the changes
`relay`    The relay of one process: source, backend, what is measured
`servicer` EventsService, which every process that publishes events serves in the same way
"""
