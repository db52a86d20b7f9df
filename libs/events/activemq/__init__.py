"""ActiveMQ as the backend, by AMQP 1.0.

=========================================  ====================================================
address                                    what
=========================================  ====================================================
`topic://VirtualTopic.PREFIX.events`       virtual topic of events; `subject` is the event type
`queue://Consumer.GROUP.VirtualTopic.…`    queue of a consumer group: ActiveMQ fills it with each
                                           event from the group's first subscription on
`queue://PREFIX.tasks`                     queue of tasks
`queue://PREFIX.tasks.retry`               failed tasks, each with the time from which it is due
`queue://PREFIX.dead-letter`               dead letters: tasks and events, with their error
=========================================  ====================================================

Messages are durable; a publish returns when the broker has accepted it. A prefetch count is the
credit of a link. The forms of the addresses are settings.

In reading order: `engine` (the protocol on asyncio), `connection` (errors, addresses, what is
open), `events`, `tasks`, `backend`.
"""
