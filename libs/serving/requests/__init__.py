"""Requests from the wire to a handler: admission, bounds, errors.

In reading order; a file imports only files above it:

`budget`        A bound on bytes in memory that many share, in the order in which they asked
`answer_budget` What answers with messages may hold in memory together, and what each may take of
                it
`arrivals`      Requests that are still arriving: few at a time while they are large, many while
                they are small
`delays`        The bound on delays that an instance sets, refused in the same words by all that
                take one
`gate`          Whether calls are let in
`shape`         Requests that are small on the wire and large in memory: refused before they are
                parsed
`stream_reads`  The reads of all streams that wait for a message: ended when what arrives takes too
                much memory
`undecodable`   Which field of a request is at fault: bytes that do not decode, or that are too
                many
`reading`       Requests on their way from the wire to a handler: counted, checked, parsed, given
                back
`guard`         What stands around every call: admission, errors, and the reading of requests
`headers`       The rules for the headers of messages that callers send, checked where they come in
`late_handlers` Handlers that are registered once the service has started; its port is bound before
"""
