"""The parts of keys and values, and every key.

In reading order; a file imports only files above it:

`buckets`    Bucket numbers: the last part of every active, done and failed key
`partitions` Which partition of a queue gets a message
`primitives` TerminatedBytes, Utf8, Array<T>, and one reader for them
`ids`        Message IDs, and the allocator of their sequences
`keys`       The keys of the RFC's records, and the parsers of those that are scanned
`own_keys`   The keys of our own records, types 0x41 and up
"""
