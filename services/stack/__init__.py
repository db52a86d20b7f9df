"""The local stack: every service as a process of its own on this machine, under one supervisor.

`launcher`  the command: checks, the lines that people see, the exit code
`stack`     all processes: order of start and end, the ready file
`process`   one service's process through its restarts
`ports`     free ports, and one after another
`options`   the command line, and what of the environment the services get

Imports go down only: launcher → stack → process; both → options, ports.
"""
