"""Ingest: accepts messages, stores them, serves their payloads and streams the metadata log.

One process owns one shard's database. How a publish goes:

    rpc.ingest ─▶ wire ─▶ write.publishing ─▶ (blobs) ─▶ waiting ──drain──▶ commit
                  check,  request IDs,                   IDs, log entry,    │
                  columns bounds                         time of receipt    ▼ durable
                                       answers, payload cache, metadata log (tailers)

Its rooms, from the ground up:

`read`    the log and its payloads             `write`   from accepted to durable
`edit`    messages that change or are removed  `wire`    from and to protobuf
`tasks`   publishes that are tasks             `rpc`     the servicers
`events`  events of publishes and edits

`shard`   one ingest shard, opened             `batches` what was accepted, as columns
`draining` its drain, until it is removed      `config`  settings
`service` the process: start, drain, stop

Only `wire`, `rpc`, `draining`, `events.relay` and `events.s3_events` know protobuf; the last three
are clients.
"""
