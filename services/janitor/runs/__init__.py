"""Runs of jobs: when they begin, their processes, and the history that is kept of them.

In reading order; a file imports only files above it:

`child`           The process in which a run has its Spark: started for it, and gone with it
`history`         Runs of jobs: one object each, below `janitor/runs/` in the root
`change_detector` Whether there is work for a job, by calls that cost the owners little
`runner`          Runs jobs one after the other, each in a child, and keeps their history current
`schedule`        When a job is due: every so often, or by a cron expression
`timetable`       Begins the jobs that are due by their schedules and have work
`working`         The child's side of `child`: does one job, reports, and ends with the janitor
`worker`          `python -m services.janitor.runs.worker`: the child's command
"""
