"""Benchmarks: each workload, compared with the limit of the same machine in the same run."""
