"""Commands over many messages that take effect in one commit.

In reading order; a file imports only files above it:

`execute` Lists of commands that take effect together: all of them, in order, in one commit, or
          none
`remove`  Removals: entries that others think may go, judged again by what the queue knows
`settle`  What somebody decided about single dead letters: it takes effect in one commit, or not at
          all
"""
