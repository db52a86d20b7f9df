"""From an accepted publish to a durable one.

In reading order; a file imports only files above it:

`dedupe_keys` Which message each dedupe key stands for: makes publishing a message twice safe
`id_gaps`     Where the log's IDs jump: noted with the first messages after a restart
`pushing`     How far the brokers' outboxes are stored here: makes sending their rows again safe
`request_ids` Who published what in the last minutes: makes repeating a publish safe
`line`        The order in which publishes are handed to the commit
`waiting`     A publish or a push on its way to its commit
`uploads`     Payloads that do not fit into records, on their way to objects of their own
`publishing`  Publishing: from what was accepted to what is durable
"""
