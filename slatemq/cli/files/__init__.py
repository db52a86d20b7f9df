"""`slatemq export` and `import`: queue files of a server's queue.

In reading order; a file imports only files above it:

`windows_lines`  What editors on Windows do to a file: Windows line ends (CRLF), a byte order mark
`queue_files`    Messages of a queue as entries of a queue file (TextQueue), and back
`exporting`      `slatemq export`: the messages of a queue as a queue file
`import_journal` The journal of an import: continuing after a kill does nothing twice
`importing`      `slatemq import`: the messages of a queue file into a queue, or published
"""
