"""Runs of jobs: when they begin, the processes that they have, what is kept of them.

In reading order; a file imports only files above it:

`child`           The process in which a run has its Spark: started for it, and gone with it
`history`         Runs of jobs, and where they are kept: one object each, below `janitor/runs/` in
                  the root
`active`          What a janitor holds of a run while it has not ended, and how much of those that
                  have
`change_detector` Whether there is any work for a job, asked of the owners with calls that cost
                  them little
`run_events`      What others are told of runs: nothing, as in direct mode
`runner`          Runs jobs, one after the other, each with a child process, and keeps their
                  history current
`schedule`        When a job is due: every so often, or by a cron expression
`timetable`       Begins the jobs that are due by their schedules, those for which there is work
`working`         The child's side of `child`: does one job, tells how far it is, and ends with the
                  janitor
`worker`          `python -m services.janitor.runs.worker`: the child that a janitor starts for a
                  run
"""
