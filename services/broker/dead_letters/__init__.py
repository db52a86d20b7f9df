"""Dead letters, and other entries, on their way out of stored rows: one engine, four policies.

In reading order; a file imports only files above it:

`mover`          Takes messages out of the stored rows of a queue's lists: one engine, on which
                 policies decide
`removals`       The policies of removals and archives: entries past their retention go, dead
                 letters are archived and come back
`redrive_runner` Runs redrives in the background: reads rows of failed lists, judges, and moves
                 step by step
`settler`        The policy of settlements: what SettleDeadLetters decides about single dead
                 letters
"""
