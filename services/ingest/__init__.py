"""Ingest: accepts messages, stores them, serves their payloads and streams the metadata log.

One process owns one shard's database. How a publish goes:

    servicer ─▶ wire.accept ─▶ Publisher.publish ─▶ (blobs) ─▶ waiting ──drain──▶ commit ─▶ durable
                validate,       request IDs,                   IDs, log entry,         │
                into columns    bounds                         time of receipt         ▼
                                                  answers, PayloadCache, MetadataLog (tailers)

`batches`        what was accepted, as columns     `publishing`  the commit loop's source
`request_ids`    who published what lately         `tailing`     the metadata log, followed
`payload_cache`  fresh payloads                    `reading`     messages by ID
`wire`           from and to protobuf              `servicer`    IngestService
`service`        the process: start, drain, stop   `config`      settings

Only `wire` and `servicer` know protobuf.
"""
