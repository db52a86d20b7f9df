"""`slatemq export` and `import`: queue files of a server's queue.

In reading order; a file imports only files above it:

`windows_lines`  What editors on Windows make of a file: line ends of their own (CRLF), a byte
                 order mark
`queue_files`    Messages of a queue as entries of a queue file (TextQueue), and back
`exporting`      `slatemq export`: the messages of a queue as a queue file
`import_items`   Messages of a queue file as what an import sends, and the names under which it may
                 be repeated
`import_journal` What an import of a queue file leaves beside it: going on after a kill does
                 nothing twice
`importing`      `slatemq import`: the messages of a queue file into a queue, or published
"""
