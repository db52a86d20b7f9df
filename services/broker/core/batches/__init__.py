"""Commands over many messages that take effect in one commit.

In reading order; a file imports only files above it:

`execute` Lists of commands that take effect together: all of them, in order, in one commit, or
          none
`remove`  Removals: entries that a job wants removed, judged again by what the queue knows
`settle`  Decisions about single dead letters: they take effect in one commit, or not at all
"""
