"""The intermediate representations: index and value expressions, loop programs, kernels."""
