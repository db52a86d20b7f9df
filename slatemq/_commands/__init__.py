"""Commands that take effect together, and queues as stores of items. Private.

In reading order; a file imports only files above it:

`ref_set`          Items by ID, each for as long as it is referred to: the RefSet of Splinter's
                   abstract queue; what a view needs of a queue, and a queue in memory
`message_refs`     A queue of messages as a store of items: tokens for items, and leases on them
`command_calls`    Executing commands together, and changes of a queue of items that wait to be
                   executed so: a part of the client
`queue_file_store` A queue in a queue file, for views: a part of its own, since most clients load
                   no queue files
"""
