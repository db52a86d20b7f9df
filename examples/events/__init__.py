"""What events of SlateMQ are good for: one small program each.

`webhooks`          POSTs each event to a URL, signed, until it is taken
`webhook_receiver`  the other end: checks the signature, takes each event once
`signatures`        the signature of both
`audit_log`         appends each event to a file of its day, once
`audit_log_redis`   the same, from Redis Streams
`cached_files`      a cache that forgets what an event says has changed
`replicate`         copies each message into another instance, once
`queues`            the queue that they consume from
"""
