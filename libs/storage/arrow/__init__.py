"""Many records as Arrow columns.

In reading order; a file imports only files above it:

`columns` Many values as columns: NumPy reads a field of all of them in one pass
`log`     The metadata log, and payload records
`packs`   Payloads of records and of packs
`queues`  The lists of a queue
"""
