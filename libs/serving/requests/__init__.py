"""Requests from the wire to a handler: admission, bounds, errors.

In reading order; a file imports only files above it:

`budget`   The bytes of responses in memory, which callers share
`arrivals` Requests that are still arriving: few at a time while they are large
`shares`   Places that all callers want: one principal has half of them at most
`gate`     Whether calls are let in
`shape`    Requests that are small on the wire and large in memory; which field is at fault
`reading`  Requests on their way from the wire to a handler: counted, checked, parsed
`partitions` The partition that a call is for, as its metadata says
`calls`    Served calls as spans and durations, refused ones among them
`auditing` Acts of callers, recorded with their outcome: logged, and as events
`open_calls` Streams and waiting claims, which end soon after they would be refused
`doors`    The doors of a process: the port for clients, and the port for services
`guard`    What surrounds every call: admission, errors, and the reading of requests
`headers`  The rules for headers and delays of messages, in the same words for all callers
`paging`   Pages of listings, in the same words for all callers
`expressions` Expressions: what is wrong with one, and where, in the same words for all callers
"""
