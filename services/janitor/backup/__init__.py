"""Backups of an instance in another store, and instances made from them; nothing here needs Spark.

In reading order; a file imports only files above it:

`catalogue`   What a backup has, and which backups there are
`copying`     Copies objects from one root to another, many at a time, those that lack alone
`damage`      What a backup lacks, in words
`checking`    Reads copies again, and finds those that have rotted
`shards`      Snapshots of all shards: from their owners, or of an instance that is stopped
`turns`       One backup at a time below a backup root
`taking`      Takes a backup: what is copied when, so that no shard lacks what others need
`renumbering` What a copied instance must not continue as it was: numbers given out since
`queue_places` Where each queue is by the brokers' databases; claims of the names that say so
`restoring`   Makes an instance from a backup
`verifying`   Reads all that one backup needs
`lacking`     Finds the messages of a backup whose payload it lacks
`worker`      The child that a janitor starts for a run of `backup`
`command`     `python -m services.janitor backup`: create, ls, verify, restore
"""
