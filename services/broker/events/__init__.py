"""The events of a broker's changes. Loaded where event queues are on.

In reading order; a file imports only files above it:

`recorded_events` The events of a broker shard's changes
`relay`           The relay of one broker: what its commands have changed
"""
