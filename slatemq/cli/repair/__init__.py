"""`slatemq message`, `done`, `failed` and `outbox`.

In reading order; a file imports only files above it:

`dead_letter_plans`    What an edited export of dead letters asks for, one at a time, in constant
                       memory
`dead_letter_settling` Showing what an edited export of dead letters asks for, and doing it
`archive_settling`     Doing with archived dead letters what an edited export of them asks for
`messages`             `slatemq message` and `slatemq done`: single messages in their queues
`dead_letters`         `slatemq failed`: dead letters, and moving them back
`failed_edit`          `slatemq failed edit`: dead letters in an editor
`outbox`               `slatemq outbox`: pushes that have not arrived, and what to do about them
"""
