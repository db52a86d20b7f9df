"""A shard that an instance does without, since what it had is lost; nothing here needs Spark.

In reading order; a file imports only files above it:

`running` Whether the process of the shard still runs
`command` `python -m services.janitor give-up`
"""
