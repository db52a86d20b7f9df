"""The manifests of deploy/kubernetes, as a cluster would use them.

In reading order; a file imports only files above it:

`manifests` What `kubectl kustomize` makes of the base and the overlays
`volumes`   Volumes of Secrets and ConfigMaps, laid and changed as a kubelet does
`fake_api`  As much of Kubernetes' API as Spark's driver asks for executors
`pods`      The pods of a workload: their environment, command and probes, as a kubelet has them
"""
