"""The janitor's jobs.

Each is DataFrame logic, which knows no service, no snapshot and no root, in a module of its own,
and a `Work` in `run`, which reads the tables, sends what was found to its owners, and counts.

In reading order; a file imports only files above it:

`contract`     What callers of jobs pass, and what jobs return
`archive`      The archive of dead letters: Parquet below the root, by queue and day, in parts
`batches`      Rows on their way to their owners: in order, in batches, and the results counted
`owners`       The owners of the databases, for a task of Spark that sends them what it has found
`contents`     The payloads of messages, read by ID from snapshots of the ingests
`removing`     Tasks that ask owners to remove what a partition holds; each returns counts
`moments`      Times as the jobs compare them: milliseconds in Python, timestamps in Spark
`leftovers`    Payload objects, and what names them: finds those that nothing names
`task_bodies`  The bodies of write tasks that no task needs any more
`removable`    What may go: what is past its retention, what no queue needs any more
`standing`     How far logs and brokers are, by their snapshots
`work`         A job at work: its tables, its phases, its progress, and whether it was cancelled
`clearing`     The jobs that remove: `retention`, `unreferenced` and `done`, over an instance
`dead_letter_jobs` The jobs over dead letters: into the archive, and back from it; their tasks
`report_page`  The page of a report: one file that loads nothing, for phones and large screens
`report`       The job `report`: what happened in each queue on each day, as Parquet and as a page
`verifying`    The jobs `verify` and `repair`, which need no Spark
`run`          Runs a job: snapshots of every shard, the logic of the job, its owners' answers
"""
