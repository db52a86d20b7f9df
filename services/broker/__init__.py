"""The broker: owns the queues of one shard, and every lease on their messages.

Its rooms, from the ground up; a room imports only rooms above it:

`core`         the state machines of the shard, pure
`shard`        the process around them: loading, commits, what is due
`requests`     what the RPCs share: limits, lease tokens, queues from and to protobuf
`delivery`     claims meet messages
`entries`      entries listed, found, watched, edited
`outbox`       commands that push to other shards
`dead_letters` dead letters redriven, settled, archived, removed
`moves`        queues that leave for other shards, or arrive from them
`rpc`          one servicer for each gRPC service
`events`       the events of changes, where event queues are on

`config`       settings                     `metrics`  what the broker measures
`service`      the process: start, serve, stop; and what there is while its shard is open
"""
