"""The write-ahead logs of an instance, moved to a store of their own; nothing here needs Spark.

In reading order; a file imports only files above it:

`wals`    The steps of a move, and how an instance goes on whose WALs are lost
`command` `python -m services.janitor move-wals`
"""
