"""A stack among those who mean it harm: `python -m tests.faults hostile`.

In reading order; a file imports only files above it:

`http2`     Frames by hand, and ports to send them to
`rpcs`      Every RPC, found in the descriptors
`generated` Requests of every sort, each made from the seed and its number
`target`    The stack: ports, tokens, processes and their memory
`calls`     Generated requests made by gRPC's own client, and what answers must not be
`floods`    Garbage, frames without end, connections that do nothing
`raw_calls` Calls that no gRPC client makes
`http1`     What comes to the port for HTTP
`pages`     What comes to the console
`state`     Batches of refused requests, and the state before and after
`witness`   A client that behaves, beside them
`run`       All of it, and the verdict
"""
