"""JanitorService.

In reading order; a file imports only files above it:

`archived` Archived dead letters with their content: their broker's list, joined with the archive
`janitor`  JanitorService: from protobuf to the runs and back
"""
