"""Publishing. Private.

In reading order; a file imports only files above it:

`published` The result of a publish: the message's ID, and what else is known of it
`wire`      Messages on their way out: their wire form, their size, and errors about one of many
`shards`    The ingest shard of a request: that of its dedupe keys, or any, in turn, that answers
`streams`   Requests on a stream to their ingest shard: a quarter of the work of a call for each
`sending`   Sending a request: on the stream of its shard first, then by calls for as long as it
            takes
`gathering` Single messages: gathered into requests while others are under way, and sent in the
            background
`publisher` Publishing, of single messages and of many; every request may be repeated safely
"""
