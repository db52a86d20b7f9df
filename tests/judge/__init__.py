"""A judge of histories: what clients wrote down, and nothing else, says whether a queue works.

It is written from the definitions of README and docs/ alone, and imports nothing of SlateMQ: the
standard library, and `cel-python` for filters, which is not the library that the services evaluate
them with. So it works on files alone, also those of other clients::

    python -m tests.judge HISTORY.jsonl… [--edn FOLDER]

docs/reference/histories.md has the format.

`histories`   From lines to operations: what was asked, what came of it, and between which times
`filters`     Filters evaluated by cel-python
`facts`       From operations to messages, deliveries, and what consumers did with their leases
`whole`       What rules must know of all messages, or hold of all
`rules`       What must hold of them
`links`       Which messages must be judged together
`parts`       A history judged part by part, in as much memory as one part takes
`edn`         The same history for Jepsen's total-queue and Elle
"""
