"""Small objects, read and written whole, and syncs to the disk.

In reading order; a file imports only files above it:

`durability`       Syncs that make finished writes survive a power failure
`requests`         Counts the requests for small objects
`patience`         Requests of a process that starts, which outlast a store that is down
`small_objects`    Small objects below a root: blobs, topology, probes
`digests`          The digests of objects, by which damage is found
`json_objects`     Objects of JSON, read with one kind of error
`task_folders`     Where the bodies of write tasks are
`unfinished_files` Files of uploads that were killed, on `file://`
`topology_entries` Where a process notes what it serves
`instance_records` The settings of the instance: numbered objects, the highest of which is valid
`probe`            Tests of a store before it is used: conditional writes, and its clock
`queue_names`      The broker shard that may use a queue's name: numbered objects
`shard_owners`     The process that may own a shard: numbered objects
`restores`         What marks a root to which a backup is being restored
`removed_shards`   The shards that were removed, whose numbers are not used again
"""
