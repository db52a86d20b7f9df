"""The janitor's jobs.

Each is DataFrame logic alone in the module of its name, which knows no service, no snapshot and no
root, and a `Work` in `run`, which reads the tables, sends what was found to its owners, and counts.
"""
