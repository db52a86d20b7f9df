"""`slatemq consume`, `claim`, `ack`, `nack` and `extend`.

In reading order; a file imports only files above it:

`claiming`  `slatemq claim`, `ack`, `nack` and `extend`: leases by hand
`programs`  Programs that `slatemq consume --exec` runs, one for each message
`consuming` `slatemq consume`: messages as they come, to a program or to stdout
"""
