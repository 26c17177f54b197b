"""Kernels to source text: C++, Triton, GEMM templates and the host program."""
