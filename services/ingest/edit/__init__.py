"""Stored messages that change or are removed.

In reading order; a file imports only files above it:

`changes`     Changes of stored messages, one at a time, written with the publisher's commits
`purge_rules` When a message may be removed permanently: its age, its event, the shard's purge epoch
`purging`     Removing messages permanently, on behalf of the janitor
`replacing`   Replacing the payload and the headers of a stored message
"""
