"""`slatemq tq`: queue files without a server.

In reading order; a file imports only files above it:

`input`    What the commands of queue files share: options, and reading files and stdin
`output`   Entries of queue files as lines and as JSON, and their errors as those of the command
`marking`  `slatemq tq done`, `fail`, `release` and `set`: changes of single messages, in place
`commands` `slatemq tq`: queue files that people read and edit
"""
