"""Archived dead letters, read back.

In reading order; a file imports only files above it:

`archived` Archived dead letters with their content: what their broker lists, joined with the
           archive
`parts`    What the parts of the archive have of letters that are wanted, with PyArrow alone
"""
