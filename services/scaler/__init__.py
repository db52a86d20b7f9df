"""The scaler: answers KEDA how much work a queue has, so that its workers are as many as it needs.

One process without state of its own: each answer is made from calls of the public client, by the
rights of the scaler's own token. It may be stopped and started at any instant, and any number may
run.

`config`   settings
`stubs`    what is generated from KEDA's proto
`triggers` what a trigger's metadata asks: a queue, a mode, a target
`rates`    how many messages a second come into a queue
`readings` the depth, age or rate of a queue, and whether it has work
`servicer` KEDA's calls
`service`  the process: its port, TLS, start and end

Imports go down only: service → servicer → readings → rates, triggers, config.
"""
