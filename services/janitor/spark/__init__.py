"""Spark: sessions, snapshots, and the tables of an instance.

In reading order; a file imports only files above it:

`failures`     The cause of a failure, found in Spark's errors among Java's and Python's stacks
`tables`       The tables that `format("slatemq")` reads: their columns, and where their rows lie
`wanted`       What a query wants of a table, as far as it narrows the keys to read
`planning`     Plans a scan: which keys of which snapshots to read, cut into pieces of a like size
`moved_queues` Which queues have moved to another shard, and are read there alone
`scans`        Has Spark keep the scans of a table apart, which Spark 4.3 does not
`source`       `spark.read.format("slatemq")`: tables read from snapshots by the executors
`snapshots`    Snapshots of every shard of an instance, kept alive while they are read; their tables
`packages`     What jobs need of the machine
`session`      The Spark session: its Java, and where it runs
`executor`     An executor of Spark, in a pod of the janitor's image
`sql`          `python -m services.janitor sql 'SELECT …'`: a question, answered by Spark
"""
