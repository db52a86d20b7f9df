"""Databases: one opened for writing, its commits, its snapshots.

In reading order; a file imports only files above it:

`binding`       The one door to SlateDB's binding beside its public calls
`commit_thread` Small commits in a thread: write, flush and sync, and one return to the loop
`settings`      The one table of SlateDB settings, for each kind of database, every value with its
                reason
`slate`         One SlateDB database, opened for writing: the only place that calls SlateDB's read
                and write API
`formats`       The format of a database: one number for all layouts of its records, written when
                it is made
`opening`       Opening a database takes as long as it makes progress: no clock ends it while the
                store answers
`snapshots`     Snapshots: states of a database that stay readable from anywhere while its owner
                goes on
`roots`         A root: the one place, named by a URL, that holds everything of one SlateMQ
                instance
`blobs`         Payloads too large for a record: one object each, below `blobs/`, under a random
                name
`clocks`        Time that never goes back, and the wait that SlateDB asks for after a clock that
                did
`commits`       Group commit: changes apply in memory at once, one loop makes them durable, then
                answers go out
`log_positions` Where in a metadata log a time stands: found by halving, as times never go back
                along a log
`queue_ranges`  Which rows of a database are alive, as runs of keys: for whoever reads one from
                outside
"""
