"""Kafka as the backend.

==============================  ================================================================
topic                           what
==============================  ================================================================
`PREFIX.TYPE`                   events of one type, such as `slatemq.object.created`
`PREFIX.tasks`                  tasks
`PREFIX.tasks.retry`            tasks that failed; the header `not-before` delays each
`PREFIX.dead-letter`            tasks that failed too often; its group has what was retried
`PREFIX.dead-letter.events`     events that no subscriber acknowledged, and what is not a task
==============================  ================================================================

Events are partitioned by bucket, else by queue, else by a routing header, so that those of one
bucket or queue stay in order. Offsets are committed up to the first event or task that
is not finished: nothing is skipped, and what was finished behind it may come again.

In reading order: `connection` (errors, topics), `offsets`, `events`, `dead_letters`,
`tasks`, `backend`.
"""
