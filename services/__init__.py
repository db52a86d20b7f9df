"""The services of SlateMQ, each a process of its own, and the local stack that runs them all."""
