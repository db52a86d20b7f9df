"""The janitor: reads snapshots of all shards with Spark, for jobs and for questions in SQL.

It writes no database. What it reads it reads straight from the object store, in Spark's executors.

`java`       the Java that Spark runs on, found or brought along
"""
