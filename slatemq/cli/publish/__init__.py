"""`slatemq publish`, `events` and `task`.

In reading order; a file imports only files above it:

`pointers`      Headers from JSON lines: RFC 6901 pointers, each naming a header by its last
                segment
`lines`         A file of lines as batches of messages, in constant memory
`runs`          Names the requests of a `publish --jsonl`, so that going on after a failure stores
                nothing twice
`bulk`          Publishing a file of lines: several batches under way, and a count that is certain
`event_files`   Files of notifications: one JSON document, or one on each line
`events_status` `slatemq events status`: how far events are published to the backend of event
                queues
`events`        `slatemq events`: events of other systems into SlateMQ, and its own in other
                systems
`reach`         Which queues a publish reaches, as far as a quick question tells
`jsonl`         `slatemq publish --jsonl`: every line of a file, and how to go on after a failure
`publishing`    `slatemq publish`: one message, or every line of a file
`tasks`         `slatemq task`: what became of publishes that were accepted as tasks, and what to
                do about it
"""
