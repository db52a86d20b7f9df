"""SlateMQ beside its peers: the same workloads through all of them, in one run, on one machine."""
