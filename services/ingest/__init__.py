"""Ingest: accepts messages, stores them, serves their payloads and streams the metadata log.

One process owns one shard's database. How a publish goes:

    servicer ─▶ wire.accept ─▶ Publisher.publish ─▶ (blobs) ─▶ waiting ──drain──▶ commit ─▶ durable
                validate,       request IDs,                   IDs, log entry,         │
                into columns    bounds                         time of receipt         ▼
                                                  answers, PayloadCache, MetadataLog (tailers)

`batches`        what was accepted, as columns     `publishing`  the commit loop's source
`waiting`        one publish on its way            `uploads`     payloads that become objects
`request_ids`    who published what lately         `tailing`     the metadata log, followed
`dedupe_keys`    which message a key stands for    `duplicates`  those of one publish
`payload_cache`  fresh payloads                    `reading`     messages by ID
`pushing`        how far outboxes are stored       `replacing`   messages that change
`purging`        messages that are removed         `rows`        payloads and packs by number
`purge_epoch`    raised before each replay         `purge_rules` when a message may go
`event_relay`    publishes, where events are on:   `published_events` those of the log
`shard_events`   these and those of edits
`wire`           from and to protobuf              `servicer`    IngestService
`queued`         publishes as tasks                `task_*`      its parts
`s3_events`      POST /s3-events over HTTP
`service`        the process: start, drain, stop   `config`      settings

Only `wire`, `servicer`, `event_relay` and `s3_events`, a client of IngestService, know protobuf.
"""
