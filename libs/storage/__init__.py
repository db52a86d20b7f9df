"""The one place that knows bytes, keys and SlateDB; knows no gRPC and no protobuf.

Its rooms, from the ground up; a room imports only rooms above it:

`errors`    what may be raised
`layout`    what all keys and values are built of, and every key
`records`   the values, a module per kind of record
`objects`   small whole objects, and what makes them durable
`database`  SlateDB: one database, its commits, its snapshots, and roots, which hold all of it
`arrow`     records as columns, many at once

docs/reference/encodings.md describes the bytes for other implementations.
"""
