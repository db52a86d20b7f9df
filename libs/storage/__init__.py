"""The one place that knows bytes, keys and SlateDB; knows no gRPC and no protobuf.

The byte layouts, pure, each drawn beside its code; a row imports only rows above it:

    errors                                       what may be raised
    primitives                                   TerminatedBytes, Utf8, Array<T>, Reader
    ids, buckets                                 message IDs and their allocator; bucket numbers
    keys                                         every key, and the ranges that are scanned
    payloads, metadata, queues, configs, states  the values, a module per kind of record

The database and the object store, likewise:

    settings, fastffi, durability, clocks        what SlateDB and the file system need to be told
    objects, slate                               an object store; a database
    roots                                        both, opened from one URL
    blobs, probe                                 large payloads; what a store must be able to do
    commits                                      the commit loop; it knows the clock's key and value

docs/reference/encodings.md describes the bytes for other implementations.
"""
