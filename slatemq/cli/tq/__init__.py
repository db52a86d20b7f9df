"""`slatemq tq`: queue files without a server.

In reading order; a file imports only files above it:

`entries`  What the commands share: options, entries of files and stdin, and their errors
`commands` `slatemq tq`: queue files that people read and edit
"""
