"""Small whole objects, and what makes them durable.

In reading order; a file imports only files above it:

`durability`       What stands between a finished write and an answer that survives a power failure
`small_objects`    Small whole objects below a root: blobs, topology, probes
`instance_records` The settings of the instance: small objects below its root, of which the highest
                   number holds
`probe`            Two questions to a store before it is trusted: does it keep its promises, and
                   what time is it
`queue_names`      Which broker shard may use a queue's name: small objects, of which the highest
                   number holds
"""
