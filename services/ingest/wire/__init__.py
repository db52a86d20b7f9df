"""Messages and log entries, from and to protobuf.

In reading order; a file imports only files above it:

`publishes` Messages and log entries, from and to protobuf
`reads`     What brokers ask of ingest, from and to protobuf; its limits are checked here, as in
            `wire`
"""
