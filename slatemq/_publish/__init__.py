"""Publishing. Private.

In reading order; a file imports only files above it:

`published` What publishing gives: the message's ID, and what else is known of it
`wire`      Messages on their way out: their wire form, their size, and errors about one of many
`requests`  Sending one request of messages, on the shard that it belongs to, as often as it takes
`streams`   Requests of messages on a stream to their ingest shard: a quarter of the work of a call
            for each
`gathering` Single messages: gathered into requests while others are under way, and sent in the
            background
`publisher` Publishing, of single messages and of many; every request may be repeated safely
"""
