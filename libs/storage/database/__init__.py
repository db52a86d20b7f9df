"""Databases: one opened for writing, its commits, its snapshots.

In reading order; a file imports only files above it:

`binding`       The one door to SlateDB's binding beside its public calls
`commit_thread` Small commits in a thread: write, flush and sync, and one return to the loop
`statistics`    What SlateDB has counted of one database since it was opened
`addresses`     URLs of stores, taken apart
`settings`      The table of SlateDB settings, every value with its reason
`slate`         One SlateDB database, opened for writing
`formats`       The format of a database: one number for all layouts of its records
`opening`       Opening a database, which may take as long as it makes progress
`snapshots`     States of a database that stay readable from anywhere while its owner goes on
`wal_stores`    The store that the write-ahead logs are in: the root's own, or one of their own
`files`         The objects of a database: what is copied when it moves to another root
`integrity`     Whether the files of a database are there, and whole
`roots`         A root: the place, named by a URL, that holds everything of one instance
`blobs`         Payloads too large for a record: an object each, under a random name
`clocks`        Time that never goes back
`pace`          How long a commit waits after the last one began
`commits`       Group commit: one loop makes changes durable, then responses are sent
`log_positions` The place of a time in a metadata log, found by bisection
`queue_pairs`   Whether each queue has both of its records: a config and a state
`queue_ranges`  The ranges of keys that are not garbage, for readers of a snapshot
"""
