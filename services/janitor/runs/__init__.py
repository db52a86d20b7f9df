"""Runs of jobs: when they begin, their processes, and the history that is kept of them.

In reading order; a file imports only files above it:

`folders`         Folders for the temporary files of a run: made for it, and removed with it
`child`           The process in which a run has its Spark: started for it, and gone with it
`history`         Runs of jobs: one object each, below `janitor/runs/` in the root
`change_detector` Whether there is work for a job, by calls that cost the owners little
`runner`          Runs jobs one after the other, each in a child, and keeps their history current
`timetable`       When jobs are due; begins those that are and have work
`worker`          The child's side: does one job, reports, and ends with the janitor
"""
