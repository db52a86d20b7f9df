"""Claiming messages, keeping their leases, settling them. Private.

In reading order; a file imports only files above it:

`token_rows`  Lease tokens in a row: each is the one before it, counted up in its last two
              characters
`claimed`     What a claim was answered with: runs of messages that share most of what they are
`handles`     The texts that name an entry (its handle) and prove a claim (its lease token)
`commands`    Commands that take effect together: what `Client.execute` takes, and how it is sent
`finishing`   What becomes of claimed messages: acks, nacks and extensions, gathered into few calls
`keeping`     Keeps the leases of messages alive: of those fetched ahead, and of those in work
`delivered`   Messages that a consumer holds: read them, then ack them or give them back
`consumer`    Consuming by a stream: messages as they come, fetched a little ahead, their leases
              kept
`batches`     Claiming: once, or batch after batch with the next claim under way while one is
              worked on
`processing`  Working on the messages of a consumer with several tasks
`termination` SIGTERM for workers without a handler of their own: their messages go back before
              they end
"""
