"""Events and write tasks, and the systems that carry them.

In reading order:

`envelope`        one event, and its JSON            `wall_clock`   the time that servers share
`catalogue`       the known event types              `cloud_events` CloudEvents 1.0
`tasks`           a write on its way to the store    `settings`     the YAML section `queue`
`backend`         what a system must do              `backends`     which class carries which
`s3`              notifications of S3 stores
`retrying`        waiting for one that is down       `deliveries`   giving events to handlers
`composed`        a backend of two parts         `measured`     metrics and health of a backend

`slatemq`, `redis`, `rabbitmq`, `activemq` and `kafka` are the backends; each loads its client
library when it is chosen.
"""
