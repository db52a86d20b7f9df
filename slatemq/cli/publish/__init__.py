"""`slatemq publish`, `events` and `task`.

In reading order; a file imports only files above it:

`plain_text` Plain text of messages that were encrypted, which must not be sent without keys
`lines`      A file of lines as batches of messages, and headers from JSON lines
`runs`       The request IDs of a `publish --jsonl`, so that a retry stores nothing twice
`applied`    What a publish has stored, also where it was accepted as a task
`events`     `slatemq events`: events of other systems into SlateMQ, and its own into other systems
`reach`      Which queues a publish reaches, as far as routers answer quickly
`jsonl`      `slatemq publish --jsonl`: every line of a file, and how to continue after a failure
`publishing` `slatemq publish`: one message, or each line of a file
`tasks`      `slatemq task`: publishes that were accepted as tasks, and retrying those that failed
"""
