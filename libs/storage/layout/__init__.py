"""What all keys and values are built of.

In reading order; a file imports only files above it:

`buckets`    Bucket numbers: the last part of every active, done and failed key
`primitives` The building bricks of keys and values: TerminatedBytes, Utf8, Array<T>, and one
             reader for them
`ids`        Message IDs and the numbers they are made of
`keys`       Every key, drawn beside the code that builds it, and the parsers of those that are
             scanned
`own_keys`   Keys of our own series of records, types 0x41 and up: see keys.py for what all keys
             share
"""
