"""The log and its payloads, read.

In reading order; a file imports only files above it:

`blob_reads`    Reads of payloads that are objects of their own: they end without their callers
`payload_cache` Fresh messages in memory, for the brokers that will soon ask for them
`entries`       Log entries: found by the IDs of their messages, decoded, and cut into parts
`etags`         The etag of a message: one part for its payload record, one for its headers
`rows`          Rows found by their numbers: many near ones by one scan, the others one by one
`tailing`       The metadata log, followed: recent entries from memory, older ones from the database
`message_runs`  Messages in runs, encoded for BatchGetMessages, and how many of them fit
`reading`       Messages by ID: fresh ones from memory, the others from the database and the blobs
"""
