"""The janitor: runs jobs over snapshots of all shards with Spark, and answers questions in SQL.

It writes no database, except those that the restore of a backup makes. What it reads it reads
straight from the object store, in Spark's executors.
The process that serves never loads Spark: each run has a child for that.

Its rooms, from the ground up; a room imports only rooms above it:

`asking`    calls that name the owner that is down, and looks for owners
`archive_paths`  where the archive of dead letters is
`orphans`   when a payload object that nothing names may go
`command_lines`  command lines of what works on a root without its processes
`snapshots` snapshots of all shards, kept alive while they are read
`verify`    an instance, verified and repaired
`spark`     sessions, snapshots, the tables of an instance
`jobs`      what the jobs do
`runs`      runs of jobs, their processes, their history
`backup`    backups in another store, and instances made from them
`moving`    the write-ahead logs, moved to another store
`giving_up` a shard that the instance does without
`events`    the events of runs, where event queues are on
`rpc`       JanitorService, and archived dead letters read back

`config`   settings      `metrics`  runs, counted      `service`  the process: start, health, stop
"""
