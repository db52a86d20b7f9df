"""The pages and their actions.

`login`    logging in and out
`overview` the whole instance, live
`queues`   one queue: settings, live counts, filter tester; pause, resume, purge, delete
`queue_forms` creating a queue, and changing its settings, beside a tester of its filter
`messages` the messages of a queue by state; one message, its payload and attempts
`dead_letters` those of a queue: edit, redrive, drop; redrives and their progress
`processes` shards and processes, routes and their lag, outboxes, settings of the instance
`janitor`  runs of jobs, and their reports
`events`   event queues: what is published, and tasks
"""
