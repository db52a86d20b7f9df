"""Dead letters on their way out of stored rows: redriven, settled, archived, removed.

In reading order; a file imports only files above it:

`push_rows`        The push of what a dead letter carried, or carries from now on, as a row of the
                   outbox
`remover`          RemoveEntries, from what is wanted to what is durable: reads the rows, and
                   removes bit by bit
`archive_redriver` RedriveArchived, from the request to what is durable: the content comes with the
                   call
`filters`          The filters of redrives, and what they see of a dead letter
`redrive_runner`   Runs redrives in the background: reads rows of failed lists, judges, and moves
                   step by step
`settler`          SettleDeadLetters, from the request to what is durable: reads the rows, uploads,
                   then settles
"""
