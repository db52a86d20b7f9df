"""Claims meet messages: who waits, what is selected, where payloads come from.

In reading order; a file imports only files above it:

`message_cache` The messages that are about to be delivered: fetched from the ingests, kept until
                claimed
`ingest_health` Which messages cannot be had now: their ingest does not answer, or still reads
                their payload
`waiters`       What waits in line for messages of a queue: a claim, once, or a stream, again and
                again
`late_fetches`  Fetches that go on while their lines claim what other ingests have
`in_flight_limit` Bounds the messages in flight of all queues together: each lease takes memory
                until it ends
`selection`     What is selected for a claim: as many messages as fit, whose payloads are here
`dispatcher`    Brings waiting claims and messages together
`introductions` Before a log's first message comes to a broker shard, its ingest raises its purge
                epoch
`lease_keeper`  Extends the leases of what streams delivered, as long as their consumers are heard
                of
`responses`     What claims and streams share: consumer, lease, and the messages delivered
`streams`       Consume: claims as a stream, by credit
"""
