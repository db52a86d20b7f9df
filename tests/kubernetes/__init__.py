"""The manifests of deploy/kubernetes, as a cluster would use them.

In reading order; a file imports only files above it:

`manifests` What `kubectl kustomize` makes of the base and the overlays
`pods`      The pods of a workload: their environment, command and probes, as a kubelet has them
"""
