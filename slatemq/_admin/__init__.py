"""Queues, entries, dead letters, runs and tasks: the calls of people and tools. Private.

In reading order; a file imports only files above it:

`entry_models`    Entries as the client tells them: one message in one queue, its state and its
                  attempts
`queue_models`    Queues as the client tells them: settings, counts, and how far a replay is
`admin`           Queues, explanations and the state of the instance: the calls of people and tools
`archived`        Archived dead letters: read with their content, brought back, dropped; a part of
                  the client
`watching`        Watching the delayed messages of a queue: a stream that goes on where it broke
`entries`         Looking at messages in their queues and repairing them: a part of the client
`instance_status` How the instance is doing: its processes, routes and queues, as far as they
                  answer
`events_status`   How far the processes have published their events; a part of the client
`instance`        The settings that all processes of the instance have alike; a part of the client
`janitor`         Runs of the janitor's jobs: begun, watched, cancelled; a part of the client
`message_reads`   Reading stored messages by their IDs; a part of the client
`outbox`          Pushes that have not arrived: what waits, and what was refused for good; a part
                  of the client
`queue_calls`     The client's calls about queues
`redrives`        Moving dead letters back, in the background of their broker: a part of the client
`settling`        Settling single dead letters, as somebody decided who looked at them: a part of
                  the client
`task_ids`        IDs of write tasks: `task_` and a ULID, which names the ingest shard that
                  accepted the task
`tasks`           Publishes that were accepted as tasks: what became of them; a part of the client
"""
