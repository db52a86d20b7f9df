"""A shard that an instance does without, since what it had is lost; nothing here needs Spark.

`command` `python -m services.janitor give-up`
"""
