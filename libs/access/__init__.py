"""Who calls, and what that principal may do.

In reading order; a file imports only files above it:

`principals`     Who calls: a principal, as an authenticator found it
`verbs`          What a policy permits principals to do
`reloading`      What a file says, read again when the file changes
`token_file`     Static tokens: a file of names and hashes
`token_checks`   Checks of static tokens: few at once, and few of one ID after wrong secrets
`ending`         Requests by HTTP that can be ended from outside
`jwt_tokens`     Tokens of other systems: JSON Web Tokens (RFC 7519), checked with their issuer's
                 keys (RFC 7517)
`authentication` From the metadata of a call to its principal
`policy`         What principals may do: roles of verbs on queues, bound to names
`explanations`   Why a policy permits something or does not: what each rule says that is about
                 the verb
`methods`        What each RPC asks of its caller, as its proto file says
                 (`slatemq/v1/access.proto`)
`quotas`         What each principal takes of this process, held to the limits of the policy
`callers`        The caller of each call: who it is, what it may do, and what it takes
`current`        The caller of the call that a task serves
`audit`          Who did what: the acts that change more than messages
"""
