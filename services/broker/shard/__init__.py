"""The process around the core: it loads, commits, wakes queues whose time has come, and cleans up.

In reading order; a file imports only files above it:

`change_pace`     Limits the rate at which queues change, so that messages keep moving meanwhile
`load`            How much the shard has to do, for the choice of the shard of a new queue
`loading`         Reads the broker's database: all state at start, and cold buckets when a command
                  needs them
`locations`       On which broker shards a queue is: what the claim of its name says
`lost_time`       Time that does not count for leases: of starts, drains, standstills and steps
`owner`           The shard in its process: runs commands on the pure state, commits what they
                  change, ends leases
`drain`           A shard that takes no new queues, and is removed once it has nothing
`removed_ingests` What a broker shard has of the logs of removed ingest shards is removed, too
`replay_starts`   Where in the logs a queue that starts in the past begins: asked of the ingests
`sweeper`         Removes the rows of deleted and purged queues in the background, a little at a
                  time
`unique_names`    A queue's name is unique in the instance: it is claimed in the store before the
                  queue is created
"""
