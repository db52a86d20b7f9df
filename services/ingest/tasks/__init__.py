"""Publishes that are tasks of a queue backend (the consistency `async` or `sync`).

In reading order; a file imports only files above it:

`backend`  the queue backend that holds this shard's write tasks
`bodies`   their bodies: small ones travel in their tasks, others are objects
`outcomes` their outcomes, durable, so that a task that comes again is not applied again
`traces`   their traces, from the call that enqueued each to its messages
`plain`    stores those that wait for nothing but their commit, many at a time
`consumer` applies them, each once, in the order in which the backend delivers them
`retries`  moves dead letters back, to the end
`cleanup`  removes bodies that no task names, and records that no task needs
`queued`   all of these together, between QueuedServicer and the shard
`servicer` TaskService
"""
