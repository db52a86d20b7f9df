"""What carries events (`slatemq.events`) and write tasks: the backends.

In reading order:

`tasks`           a write on its way to the store   `wall_clock`   the time that servers share
`settings`        the YAML section `queue`          `backends`     which class carries which
`backend`         what a system must do             `deliveries`   giving events to handlers
`retrying`        waiting for one that is down      `measured`     metrics and health of a backend
`composed`        a backend of two parts            `relay`        from what is durable to a backend
`held_tasks`      tasks that a consumer has     `cancellations`  those that client libraries lose

`slatemq`, `redis`, `rabbitmq`, `activemq` and `kafka` are the backends; each loads its client
library when it is chosen.
"""
