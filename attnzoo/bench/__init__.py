"""The benchmark: a matrix of workloads on every backend, each in a process of its own, right before fast."""
