"""RabbitMQ as the backend, by AMQP 0-9-1.

==========================  ===================================================================
name                        what
==========================  ===================================================================
`EXCHANGE`                  exchange of events; the routing key is the event type
`PREFIX.events`             queue of a consumer group, bound to the types that it subscribes to
`PREFIX.tasks`              queue of tasks
`PREFIX.tasks.retry`        failed tasks; each goes back to `PREFIX.tasks` after its delay
`PREFIX.dead-letters`       exchange of dead letters: tasks and events, with their error as a header
`PREFIX.dead-letter`        the queue that is bound to it
==========================  ===================================================================

The queue prefix is the consumer group: consumers with the same prefix share. With `durable` queues
are quorum queues and messages are persistent; publishes are confirmed either way.

In reading order: `address` (the URL, and what it is refused for), `connection` (errors, the
connections of a backend, what is declared, deliveries), `events`, `tasks`, `backend`.
"""
