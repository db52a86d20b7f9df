"""The lists of a queue and of its shard beside the waiting messages and the leases.

In reading order; a file imports only files above it:

`attempts`       The failed attempts of messages: a cache of their records, newest last
`executed`       Which lists of commands took effect in the last minutes: makes repeating an Execute
                 safe
`finished_lists` The done, failed and archived lists of a queue: what each commit finished is a row
`storable`       Records of rare commands, encoded before the command changes memory
`outbox`         Pushes on their way to the ingests: numbered here, stored with the commands that
                 make them
`replays`        How far the logs from before a queue's creation are brought into it
"""
