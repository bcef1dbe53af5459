"""Benchmarks: each workload beside the physical limit of the same machine in the same minute."""
