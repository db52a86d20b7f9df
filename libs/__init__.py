"""The libraries that the services share; each knows nothing of any service.

`storage`  bytes, keys, SlateDB        `filters`  CEL over message metadata
`access`   who calls, and what that principal may do
`documents` YAML files that people write: their values, and the line of each
`events`   backends of event queues    `serving`  starting, serving and draining a process
"""
