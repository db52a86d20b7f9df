"""All that knows stored bytes, keys and SlateDB. Nothing here knows gRPC or protobuf.

Its rooms, from the ground up; a room imports only rooms above it:

`errors`    the errors it raises
`layout`    the parts of keys and values, and every key
`records`   the values, a module for each kind of record
`objects`   small objects, read and written whole, and syncs to the disk
`database`  SlateDB: one database, its commits and snapshots, and roots, which hold databases
`arrow`     many records as columns

docs/reference/encodings.md describes the bytes for other implementations.
"""
