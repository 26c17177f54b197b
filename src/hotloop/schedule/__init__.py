"""Scheduling: a loop program becomes kernels in execution order."""
