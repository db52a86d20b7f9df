"""The pages and their actions.

`login`    logging in and out
`overview` the whole instance, live
`queues`   one queue: settings, live counts, filter tester; pause, resume, purge
`messages` the messages of a queue by state; one message, its payload and attempts
"""
