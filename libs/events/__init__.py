"""The backends, which carry events (`slatemq.events`) and write tasks.

In reading order:

`tasks`          a write on its way to the store
`refusals`       what is too large for a backend
`settings`       the YAML section `queue`
`cancellations`  those that client libraries lose
`retrying`       waiting for a backend that is down
`deliveries`     giving events to handlers
`tls_faults`     whether it is TLS that keeps a server from answering
`measures`       counters of a backend
`backend`        what a system must do
`backends`       which class carries which
`watch`          the state of a backend
`relay`          from what is durable to a backend

`slatemq`, `redis`, `rabbitmq`, `activemq` and `kafka` are the backends; each loads its client
library when it is chosen.
"""
