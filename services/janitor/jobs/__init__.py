"""The janitor's jobs.

Each is DataFrame logic alone in the module of its name, which knows no service, no snapshot and no
root, and a `Work` in `run`, which reads the tables, sends what was found to its owners, and counts.

In reading order; a file imports only files above it:

`archive`      The archive of dead letters: Parquet below the root, by queue and day, in parts
`batches`      Rows on their way to their owners: in order, in batches, and what came of them,
               counted
`owners`       The owners of the databases, for a task of Spark that sends them what it has found
`contents`     The payloads of messages, read by ID from snapshots of the ingests, where the rows
               are
`removing`     Tasks that ask owners to remove what a partition holds; each gives counts
`archiving`    Tasks that put dead letters into the archive, and that push archived ones back into
               queues
`charts`       Charts as SVG, drawn here: small enough for a phone, with the numbers in their
               titles
`contract`     What a job is given, and what it gives back: for whoever runs jobs
`moments`      Times as the jobs compare them: milliseconds in Python, timestamps in Spark
`done`         Which done lists are longer than their queues keep them
`leftovers`    Objects of payloads, and who names them: tasks that find those that nobody does
`retention`    What is past its retention, and may go
`unreferenced` What no queue needs any more, and may go: messages of old, and objects that nothing
               names
`standing`     Where logs and brokers stand, by their snapshots
`work`         A job at work: its tables, its phases, how far it is, and whether it is still wanted
`clearing`     The jobs that remove: `retention`, `unreferenced` and `done`, over an instance
`dead_letters` Which dead letters are old enough for the archive, and all that is known of them
`dead_letter_jobs` The jobs over dead letters: into the archive, and back from it
`report`       What happened in each queue on each day, in numbers
`report_page`  The page of a report: one file without anything from elsewhere, for phones and large
               screens
`reports_kept` How many reports stay: each run of `report` writes one, and forgets the oldest
`reporting`    The job `report`: what happened in each queue on each day, as Parquet and as a page
`run`          Runs a job: snapshots of every shard, the logic of the job, its owners' answers,
               counted
"""
