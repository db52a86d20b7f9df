"""Entries of queues: listed, found, watched and edited.

In reading order; a file imports only files above it:

`finished_pages`  Reads the done, failed and archived lists of queues: durable rows, in order of
                  time or backwards
`handles`         Handles: the texts that say which entry of which queue is meant, and where to
                  look first
`waiting_pages`   Reads what waits in a queue without touching it: for lists, and to find a message
                  by its ID
`finder`          Finds entries: at the place that a handle names, soon behind it, or by a search
                  of the queue
`conversion`      Entries for EntryService: from what lists hold, with attempts and messages by
                  view
`delayed`         The journals of delayed messages: watched, and cleaned of what can be claimed
`editor`          Edits a delayed message: while ingest replaces its content, it is not claimed
                  here
`lister`          ListEntries: pages of the entries of a queue that are in one state
"""
