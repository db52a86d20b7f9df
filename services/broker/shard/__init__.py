"""The process around the core: it loads, commits, wakes queues whose time has come, and cleans up.

In reading order; a file imports only files above it:

`attempts_reader` Reads the attempts records of many messages: of those near one another in one
                  scan
`change_pace`     Turns for changes of queues, so that messages keep moving beside many of them
`due_queues`      Which queues have messages whose time has come: asking each of them would cost
                  all of them
`loading`         Reads the broker's database: all state at start, and cold buckets when a command
                  needs them
`owner`           The shard in its process: runs commands on the pure state, commits what they
                  change, ends leases
`replay_starts`   Where in the logs a queue that starts in the past begins: asked of the ingests
`sweeper`         Removes the rows of deleted and purged queues, behind everybody's back and a
                  little at a time
`unique_names`    A queue's name is unique in the instance: it is claimed in the store before the
                  queue is created
"""
