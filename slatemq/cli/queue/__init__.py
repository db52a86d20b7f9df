"""`slatemq queue`, `explain` and `status`.

In reading order; a file imports only files above it:

`inspecting` `slatemq explain` and `slatemq status`: what would happen, and how things stand
`queues`     `slatemq queue`: create, show, change, pause, purge and delete queues
"""
