"""Events of publishes and edits, and events of S3 stores. Loaded where they are on.

In reading order; a file imports only files above it:

`published_events` The events `message.published` of a shard: its metadata log, read behind a
                   durable cursor
`shard_events`     The events of an ingest: those of the log and those of edits, in the order of
                   the commits
`relay`            The relay of one ingest: its messages and its edits
`s3_events`        `POST /s3-events`: notifications of S3 stores, published as events; loaded with
                   an HTTP port
"""
