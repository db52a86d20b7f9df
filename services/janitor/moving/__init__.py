"""The write-ahead logs of an instance, moved to a store of their own; nothing here needs Spark.

In reading order; a file imports only files above it:

`logs`    The steps of a move, and what goes on where the logs are lost
`command` `python -m services.janitor move-logs`
"""
