"""Claims meet messages: who waits, what is selected, where payloads come from.

In reading order; a file imports only files above it:

`message_cache` The messages that are about to be delivered: fetched from the ingests, kept until
                claimed
`ingest_health` Which messages cannot be had now: their ingest does not answer, or still reads
                their payload
`lost_payloads` Messages whose payloads cannot be had any more: they become dead letters, with the
                reason
`selection`     Which of the messages that come next a claim takes: as many as fit, whose payloads
                are here
`waiters`       What waits for messages of a queue: a claim, once, or a stream, again and again
`waiter_lines`  The waiters of each queue, in line
`in_flight_limit` Bounds the messages in flight of all queues together: each lease takes memory
                until it ends
`dispatcher`    Brings waiting claims and messages together
`introductions` Before a log's first message comes to a broker shard, its ingest raises its purge
                epoch
`invalidation`  After a message was replaced: no broker delivers what it cached of it before
`lease_keeper`  Extends the leases of what streams delivered, as long as their consumers are heard
                of
`responses`     What claims and streams share: who asks for how long, and the messages they are
                given
`streams`       Consume: claims as a stream, by credit
"""
