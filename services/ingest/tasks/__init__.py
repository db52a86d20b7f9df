"""Publishes that are tasks of a queue backend (the consistency `async` or `sync`).

In reading order; a file imports only files above it:

`backend`  The queue backend that holds this shard's write tasks: connected in the background, for
           ever
`bodies`   The bodies of write tasks: small ones travel in their tasks, others are objects
`outcomes` What became of write tasks, durably: a task that comes again is not applied again
           because of it
`traces`   The trace of a publish that is a task: from the call that enqueued it to its messages
`consumer` Applies this shard's write tasks, each once, in the order in which the backend gives
           them out
`cleanup`  Removes what tasks leave behind: bodies that no task names, and records that none needs
`servicer` TaskService: what became of publishes that were accepted as tasks
`queued`   Publishes as tasks: what an ingest has where event queues have the consistency `async`
           or `sync`
"""
