"""The router: judges every published message by every queue's filter and assigns the matches.

It owns nothing and may be stopped and started at any instant; several divide the logs, and step in
for one another.

`entries`   log entries, whole or in parts
`routing`   by what they are judged: the rules of a broker shard, columns of matches
`pieces`    judged ranges of a log, and how they catch up with new configs
`route`     one log on its way to one broker shard, as a plain state machine
`wire`      log entries, configs and assignments from and to protobuf
`tails`     reading the logs: one shared stream per log, and one for each broker shard that lags
`shares`    filters that together hold up a log: which are left out
`backfill`  bringing stored messages into queues that start in the past
`reserve`   which logs a router routes at once, and which it leaves to another one
`brokers`   sending to one broker shard and keeping its configs current
`router`    finds logs and brokers in the topology and joins them
`servicer`  RouterService              `service`   the process: start, health, stop
`config`    settings                   `metrics`   counters, lag, spans

Imports go down only: service → servicer → router → brokers → reserve → backfill → shares → tails →
wire → route → pieces → routing → entries.
"""
