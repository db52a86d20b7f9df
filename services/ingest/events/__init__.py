"""Events of publishes and edits, and events of S3 stores. Loaded where they are on.

In reading order; a file imports only files above it:

`published_events` The events `message.published`: the metadata log, read behind a durable cursor
`relay`            The events of one ingest, those of its log and those of edits, and their relay
`s3_events`        `POST /s3-events`: notifications of S3 stores; loaded where it has a token
"""
