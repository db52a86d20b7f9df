"""The servicers of ingest.

In reading order; a file imports only files above it:

`ingest` IngestService, with the streams of publishes; protobuf messages stop here and in `wire`
`purge`  PurgeService; protobuf messages stop here
`queued` IngestService where publishes are tasks, answered when the queue backend has them
"""
