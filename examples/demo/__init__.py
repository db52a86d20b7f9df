"""The demo: a shop's events through three queues, with failing consumers and a killed broker.

`__main__`  the command            `script`    what happens, in order
`queues`    filters, twice: as CEL for SlateMQ, as Python for the judge
`consumers` what they do with a message, and how they fail
`judge`     says what was lost or routed wrongly, from the JSONL and the consumers' notes alone
`report`    the table
`tasks`     the other one, `--events`: publishes that a queue backend answers, through kills
"""
