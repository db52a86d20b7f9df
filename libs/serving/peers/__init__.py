"""Other processes: where they are, and calling them.

In reading order; a file imports only files above it:

`calls`     Calls of other processes: what counts as a failure of theirs, backoff, what is logged
`topology`  Who serves what, and where: one small JSON object per process
`channels`  Channels to other services: one per peer for the whole process
`elsewhere` Calls of services that this process does not have: which process has them, and where
"""
