"""Queues that move between broker shards: decision 0086 has the protocol.

In reading order; a file imports only files above it:

`rows`        The rows that a queue takes along, page by page
`targets`     The calls to the shard that a queue moves to
`copies`      The copy of a queue's rows, and how many are made at once
`arrivals`    Queues that arrive: the target's side
`arrived`     Queues that have arrived elsewhere: what is left of them at the source
`departures`  Queues that leave: the source's side
"""
