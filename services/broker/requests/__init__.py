"""The ground floor of the RPCs: limits, lease tokens, queues from and to protobuf.

In reading order; a file imports only files above it:

`limits` Checks that several of the broker's calls share
`queues` Queues between protobuf and settings: validation, defaults, and the public form
`tokens` Lease tokens as consumers see them, and who may use them
"""
