"""Archived dead letters, read back.

In reading order; a file imports only files above it:

`archived` Archived dead letters with their content: their broker's list, joined with the archive
`parts`    The wanted dead letters of a part of the archive, read by PyArrow alone
"""
