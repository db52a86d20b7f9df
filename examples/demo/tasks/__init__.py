"""`make demo ARGS=--events`: publishes that a queue backend answers, through kills.

`run`      the whole of it         `servers`  Redis, or another SlateMQ, as the backend
`script`   what happens, in order  `judge`    says what was lost or stored twice
`report`   the table
"""
