"""Claiming messages, keeping their leases, settling them. Private.

In reading order; a file imports only files above it:

`handles`    The texts that name an entry (its handle) and prove a claim (its lease token)
`commands`   Commands that take effect together: what `Client.execute` takes, and how it is sent
`finishing`  What becomes of claimed messages: acks, nacks and extensions, gathered into few calls
`delivered`  Messages of a claim: read from the answer, their leases kept, acked or given back
`claims`     One claim from one partition, of which nothing is lost where its caller is cancelled
`credit`     How much a stream may have on its way: little at first, more while the link carries it
`consumer`   Consuming by a stream: messages as they come, fetched a little ahead, their leases
             kept
`batches`    Claiming batch after batch, the next claim under way while one is worked on
`gathering`  Claiming once from all partitions of a queue
`processing` Working on the messages of a consumer with several tasks, until they end or SIGTERM
"""
