"""Watching an instance: `slatemq top` and `slatemq doctor`.

In reading order; a file imports only files above it:

`board`       The live view as text, for a terminal of any size: what is shown, in which order
`keys`        The keys that are pressed in a terminal
`view`        The board in a terminal, drawn again every two seconds; its numbers without one
`top`         `slatemq top`
`findings`    What is found in the answers of an instance, how bad it is, and what to do
`doctor`      `slatemq doctor`
"""
