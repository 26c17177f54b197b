"""From source text to something that runs: compiler, cache, build, memory.

In: the C++ that codegen/ printed. Out: loaded libraries, and memory for what they write. Read in this order:
toolchain.py (which compiler, which flags), cache.py (what is kept on disk), build.py (text to library),
pool.py (memory of outputs and of arenas).
"""
