"""The janitor: reads snapshots of all shards with Spark, for jobs and for questions in SQL.

It writes no database. What it reads it reads straight from the object store, in Spark's executors.

`tables`     the tables, their columns, and what decodes them
`wanted`     what the conditions of a query leave to be read
`planning`   which keys of which snapshots that is, in pieces of a like size
`reading`    a piece: rows from the store, columns out of them
`source`     all of this as Spark's format("slatemq")
`session`    the Spark session
`snapshots`  of all shards, taken, renewed and released
`instance`   the tables of an instance, for jobs
`sql`        the command line: questions in SQL
`java`       the Java that Spark runs on, found or brought along
"""
