"""Commands that push to other shards, and the sender of what they pushed.

In reading order; a file imports only files above it:

`targets`    What a broker asks others: whether queues exist there, where pushes go, and to take
             them
`pusher`     The pushes of one command, before it runs: where they go, and the objects of large
             payloads
`executor`   Execute, from the request to what is durable: asks others, uploads, then runs the
             commands
`sender`     Sends the outbox: for each ingest shard a line of its own, in order, from what is
             durable
"""
