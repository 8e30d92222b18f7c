"""How the dense part is computed, and how batches reach the device. With the defaults, on a CPU, none of it
is active.

    numerics.py              precision, compilation, threads
    staging.py               ring of pinned buffers, copied to the device on a separate stream
    hstu_attention.py        HSTU's attention with Triton kernels
    hstu_triton_kernels.py   the kernels
"""
