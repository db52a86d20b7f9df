"""One way to start, watch and drain a service.

`main`       the whole of a service's `__main__`: settings, logs, event loop, exit code
`server`     `Service` (what a service is) and `run_service` (its life on one server)
`guard`      around every call: errors as google.rpc.Status  `gate`  admission
`reading`    requests from the wire to a handler   `shape`      what is refused before it is parsed
`arrivals`   how many requests arrive at once      `budget`     a bound on bytes that many share
`stream_reads` the same of streams                 `answer_budget` what answers may hold
`elsewhere`  where the services of others are      `reflection` both versions of it
`config`     settings from flags and environment        `logs`       structured logs
`event_queues` the section `queue` among them            `http_parts` what services add to HTTP
`events_servicer` how far events are published
`http_server` /health and /metrics                  `prometheus` metrics as text
`telemetry`  traces and metrics, W3C context in headers `exits`      exit codes and causes
`recording`  the SDK behind it, loaded where something is recorded
`topology`   who serves what, through the root          `channels`   one channel per peer
`shards`     what every owner of a shard does alike       `delays`     the bound on delays
`peers`      calling other processes: backoff, what counts as a failure, what is logged of it
`limits`     message sizes, keepalive, backoff, each with its reason
`headers`    the rules for headers of messages
`parent`     ending with the process that started this one
`healthprobe` the same question from outside, as a command

Imports go down only: main → server → guard, telemetry, config → limits, exits; channels → topology.
"""
