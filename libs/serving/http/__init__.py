"""The HTTP port of a process, off unless set.

In reading order; a file imports only files above it:

`parts`     What a service adds to its HTTP port; light, since every service imports it
`listening` Connections by TLS, bounded from their first byte on
`server`    The HTTP port of a process: `GET /health`, `GET /metrics`, and what its service adds
"""
