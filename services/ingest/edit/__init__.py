"""Stored messages that change or are removed.

In reading order; a file imports only files above it:

`changes`     Changes of stored messages: written with the publisher's commits, applied once
              durable
`purge_epoch` The shard's purge epoch: a purge carries the epoch it was decided in, an older is
              refused
`purge_rules` When a message may be removed permanently: its age, and whether its event is published
`turns`       Locks: one change of a log entry at a time
`purging`     Removing messages permanently, on behalf of the janitor
`replacing`   Replacing the payload and the headers of a stored message
"""
