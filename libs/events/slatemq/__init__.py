"""SlateMQ itself as the backend, through its public client.

======================  =======================================================================
queue                   what
======================  =======================================================================
`PREFIX.tasks`          tasks; its dead letters are the tasks that failed too often
`PREFIX.events.GROUP`   events for one consumer group; its dead letters are those that none took
======================  =======================================================================

Events and tasks are messages whose headers name the prefix (`slatemq-events`, `slatemq-tasks`) and,
for events, the type: any other queue of the instance may filter on them, too.

In reading order: `headers` (those of messages that are events or tasks; what makes events passes
such messages over), `queues`, `attempts` (which of a message count), `events`, `routed` (which
tasks are not in their queue yet), `tasks`, `backend`.
"""
