"""Finding the processes of an instance, and calling them. Private.

In reading order; a file imports only files above it:

`forks`           Forked processes: gRPC does not survive a fork while it runs, so a client says so
                  at once
`connection_faults` Connections that fail, in plain words: gRPC's own are kept for the debug log
`rpc_status`      Errors on the wire: `slatemq.errors` to google.rpc.Status and back, in one table
`stored_runs`     Stored messages, out of the runs in which an ingest returns them
`wire_format`     Protobuf's wire format written by hand, for the messages that pass by the
                  hundred thousand
`topology_cache`  Where the processes of an instance are: learned from any of them, and kept up to
                  date
`metadata_channels` Channels whose calls carry metadata: the trace context, and the caller's token
`tls`             TLS of a client or a service: its certificates as files, read again when they
                  change
`tls_probe`       Whether a server speaks TLS, and with whom: asked when a connection has failed, to
                  say why
`connecting`      How a client's channels are opened: plain or TLS, with the metadata of every call
`peers`           Finding the processes of an instance from one address, and calling them until
                  they answer
`blocking`        Coroutines for programs without asyncio: an event loop in a thread, and faces of
                  objects
`endpoints`       The addresses that a client is given: `host:port`, several of them in a list or
                  with commas
`outages`         Outages of servers that a client waits for: in the log, and bounded where that is
                  wanted
`queue_locations` Which broker has a queue, and questions to all brokers: those that are down hide
                  no other
"""
