"""Queues, entries, dead letters, runs and tasks: the calls of people and tools. Private.

In reading order; a file imports only files above it:

`access`       What the policy of the instance permits, and why
`entry_models` Entries as the client shows them: one message in one queue, its state and its
               attempts
`queue_models` Queues as the client shows them: settings, counts, and the progress of a replay
`merging`      Merging streams that are in one order
`placement`    Which broker shard a new queue goes to
`queue_calls`  Creating, reading, changing and repairing queues
`settling`     Settling single dead letters, archived ones, too: redriving, dropping, replacing
`watching`     Watching the delayed messages of a queue: a stream that resumes where it broke
`entries`      Listing, finding and changing entries, messages in their queues; reading messages
`instance`     The processes of an instance: their status, their events, their common settings
`rates`        Rates of queues, from two samples of what has passed through them
`examining`    Examining the processes, and who the caller is
`shards`       The shards of an instance: what each has, draining and removing them, moving queues
`expiries`     When certificates expire
`job_names`    The names of the janitor's jobs
`janitor`      Runs of the janitor's jobs: beginning, watching and cancelling them
`outbox`       Pushes that have not arrived: those that wait, and those that were refused
               permanently
`redrives`     Redrives: moving dead letters back, in the background of their broker
`task_ids`     IDs of write tasks: `task_` and a ULID, which names the ingest shard that accepted
               the task
`tasks`        Publishes that were accepted as tasks, and their outcomes
"""
