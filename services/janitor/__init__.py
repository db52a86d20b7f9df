"""The janitor: runs jobs over snapshots of all shards with Spark, and answers questions in SQL.

It writes no database. What it reads it reads straight from the object store, in Spark's executors.
The process that serves never loads Spark: each run has a child for that.

`service`    the process: start, health, stop      `servicer`  JanitorService
`config`     settings                              `requests`  what callers may ask for
`runner`     runs, one after the other             `runs`      runs, and where they are kept
`active`     a run that has not ended              `queues`    whether the queues it names exist
`timetable`  begins what is due and has work       `schedule`  when something is due
`looking`    whether there is work, without Spark  `asking`    calls that name who is away
`child`      a run's process, as the janitor sees it
`worker`     the same from inside: the program     `working`   its talk with the janitor
`jobs`       what the jobs do

Spark, in children and in programs of one's own:

`tables`     the tables, their columns, and what decodes them
`wanted`     what the conditions of a query leave to be read
`planning`   which keys of which snapshots that is, in pieces of a like size
`reading`    a piece: rows from the store, columns out of them
`source`     all of this as Spark's format("slatemq")    `scans`  each with its own conditions
`session`    the Spark session                     `failures`  what its errors say
`shipping`  this code for executors elsewhere
`snapshots`  of all shards, taken, renewed and released
`instance`   the tables of an instance, for jobs
`sql`        the command line: questions in SQL    `plain_values`  their answers as JSON has them
`java`       the Java that Spark runs on, found or brought along
"""
