"""Spark: sessions, snapshots, and the tables of an instance.

In reading order; a file imports only files above it:

`failures`     What is wrong, as Spark's errors tell it among Java's stacks and Python's
`tables`       The tables that `format("slatemq")` reads: their columns, and where their rows lie
`wanted`       What a query wants of a table, as far as it narrows the keys: queues, times, IDs,
               shards
`planning`     Plans a scan: which keys of which snapshots hold what is wanted, cut into pieces of
               a like size
`snapshots`    Snapshots of every shard of an instance, kept alive for as long as somebody reads
               them
`reading`      Reads the pieces of a plan: rows from the object store, columns out of them
`scans`        Has Spark keep the scans of a table apart, which Spark 4.3 does not
`source`       `spark.read.format("slatemq")`: the tables of an instance, read from snapshots by
               the executors
`instance`     An instance's tables for a program without an event loop: a job of one's own, a
               notebook
`java`         The Java that Spark runs on: the machine's own 17 or 21, else the one that a package
               brings
`packages`     What jobs need of the machine
`plain_values` Values of Spark's columns as JSON has them; docs/how-to/analyse.md tells which
               becomes what
`shipping`     This code for executors on other machines, which then need Python and the packages
               alone
`session`      The Spark session: started when there is work, on this machine or on a cluster
`sql`          `python -m services.janitor sql 'SELECT …'`: a question to an instance, answered by
               Spark
"""
