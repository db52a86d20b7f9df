"""One service process: settings, logs, memory, health, the shard that it owns, its end.

In reading order; a file imports only files above it:

`event_settings` The `queue` section in the settings of a process; nothing of it is loaded without
                 one
`exits`          Why a service process ends, and with which exit code
`settings`       One setting: a field of a frozen dataclass, with its text, bounds, flag and
                 variable
`process_config` The settings of every process, and how settings are read from flags and
                 environment
`instance`       The settings of the instance: what must be the same in every process
`config`         Settings: frozen dataclasses, read once at start from flags and environment
`health`         The health of a process, and why it does not serve
`healthprobe`    `python -m libs.serving.process.healthprobe HOST:PORT`: exit 0 if it serves, else 1
`logs`           Structured logs on stderr: one line per event, as text or as JSON
`memory`         How a process treats its memory: what glibc keeps, how often Python looks for
                 cycles; and how much it may take
`store_watch`    A store that hangs is seen: in the log, in a metric, in the health of the process
`ownership`      One process's hold of its shard: proven, announced, and the announcement kept true
`process_measures` What a process measures of itself: memory and processor time
`parent`         Ending with the process that started this one, even when that one is killed
`ready_file`     The file that says where a process serves, once it does
`removal`        The end of a shard: when it may be removed, and what is left of it is deleted
`shards`         What every owner of a shard does alike: opens its root, waits for its clock, ends
`store_costs`    What the requests of a process to its stores cost
`commit_config`  The settings of processes that commit, and the pace of their commits
`standby`        A process that waits for a shard, warm, and takes it when its owner is silent
`store_measures` What a process measures of its store, its commits and its memory
`watchdog`       Long steps of an event loop: measured, logged with what ran, counted
"""
