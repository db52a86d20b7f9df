"""Verifies an instance: its files, every record, and what records say of one another.

It reads snapshots of a running instance, or what a stopped one has left; it writes nothing, and
needs no Spark. In reading order; a file imports only files above it:

`findings`     What is wrong, named, with what to do
`walk`         The rows of a database, decoded; goes on behind what cannot be read
`events`       Events that wait: numbered without a gap
`message_ids`  Sets of message IDs that take little memory
`dedupe_pairs` Dedupe keys and the rows of their ends: each names the other
`ingests`      One ingest's database: the log, the payloads beside it
`brokers`      One broker's database: queues, lists, counts, leases, cursors, the outbox
`parquet_parts` Which dead letters the parts of the archive have
`archive`      The content of archived dead letters
`objects`      Payload objects, names, owners, the instance, the topology
`verification` All of an instance, and its databases beside one another
`running`      The databases of a running instance, from snapshots
`repairs`      Repairs what only takes space, each by its owner's own way
`command`      `python -m services.janitor verify`, for a stopped instance
"""
