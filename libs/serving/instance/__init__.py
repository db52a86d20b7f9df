"""The settings of the instance while it runs: read and changed by any process.

In reading order; a file imports only files above it:

`changes`  Which changes of the instance's settings lose nothing, one rule for each setting that
           has one
`servicer` InstanceService, which every process serves: the settings of the instance, and their
           changes
"""
