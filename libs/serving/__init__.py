"""One way to start, watch and drain a service.

In reading order; a file imports only files above it:

`limits`     message sizes, keepalive, backoff, each with its reason
`peers`      other processes: the topology, channels, calls
`live_series` metrics whose series come and go: of queues, of routes
`telemetry`  traces and metrics, W3C context in headers
`recording`  the SDK behind it, loaded where something is recorded
`process`    settings, logs, memory, health, the shard that a process owns, its end
`tls`        TLS of a port: certificates that are read again, and what clients prove
`revocations` certificates that were revoked: lists of their authorities
`examination` what a process finds when it examines itself
`instance_servicer` InstanceService: what all processes have alike, and which changes lose nothing
`grpc_port`  a port of gRPC, served by one server after another if need be
`http`       the HTTP port: /health and /metrics
`startup`    what every process begins with: its log, its open files, its parent, its metrics
`requests`   requests from the wire to a handler: admission, bounds, errors
`access`     what protects the ports: TLS, the policy, and who the services are
`access_servicer` AccessService: what the policy of a process permits, and why
`reflection` both versions of it
`shard_servicer` ShardService of each owner of a shard
`snapshot_servicer` SnapshotService of each owner of a database
`events`     event queues, as every process has them
`service`    what a service is: its servicers, its start and its end
`server`     `RunningService`: the life of a service on one server
`main`       the whole of a service's `__main__`: settings, logs, event loop, exit code
"""
