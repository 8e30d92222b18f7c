"""Where and how the dense part is computed, and how a batch gets there; with its defaults, on a CPU, nothing of it is in the way.

numerics.py         precision, compilation, threads
staging.py          a ring of pinned buffers that are copied on a stream of its own
hstu_attention.py   HSTU's attention by kernels
hstu_kernel.py      the kernels
"""
