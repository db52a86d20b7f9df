"""JanitorService.

In reading order; a file imports only files above it:

`queues`   Whether the queues that a run names exist: a wrong name would find nothing to do, and
           say so
`requests` What callers may ask for: every field is checked before anything is begun
`janitor`  JanitorService: from protobuf to the runs and back
"""
