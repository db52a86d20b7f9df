"""The messages of a shard that are in flight.

In reading order; a file imports only files above it:

`lease_bucket` Leases in memory: an object for each, or the leases of a large claim as columns
`token_index`  Where each running lease lies, by its token
`leases`       Leases: the messages of a queue that are in flight, when leases end, and how they
               ended
"""
