"""Records as Arrow columns, many at once.

In reading order; a file imports only files above it:

`columns` Many values at once, as columns: NumPy looks at all of them in one pass, Arrow takes the
          texts
`keys`    What the keys of many active buckets say, as columns
`log`     The metadata log and the payload records as Arrow columns; layouts: metadata.py,
          payloads.py
`packs`   Stored payloads as Arrow columns; the layouts of both kinds: payloads.py,
          payload_packs.py
`queues`  The lists of a queue as Arrow columns; layouts: queues.py
"""
