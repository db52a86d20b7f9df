"""Stored messages that change or are removed.

In reading order; a file imports only files above it:

`changes`     Changes of what is stored already: written with the publisher's commits, told when
              durable
`purge_epoch` The shard's purge epoch: whoever decides to purge carries the one he saw, an older is
              refused
`purge_rules` When a message may be removed for good: its age, and whether its event is published
`turns`       Whose turn it is to rewrite a log entry
`purging`     Removing messages for good, on behalf of the janitor
`replacing`   Replacing the payload and the headers of a stored message
"""
