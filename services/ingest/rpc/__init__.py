"""The servicers of ingest.

In reading order; a file imports only files above it:

`publish_streams` PublishStream: publishes over one call, answered as they become durable
`ingest`          IngestService; protobuf messages stop here and in `wire`
`purge`           PurgeService; protobuf messages stop here
`queued`          IngestService where publishes are tasks: they are answered when the queue backend
                  has them
"""
