"""The events of runs. Loaded where event queues are on.

In reading order; a file imports only files above it:

`owed_events` The events of a janitor's runs: each is owed until its run's object says that it is
              published
`relay`       The relay of one janitor: its runs
"""
