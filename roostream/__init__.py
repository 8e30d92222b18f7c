"""The contract that all programs share: schema, messages, ids, batches, transforms, counters, errors,
configuration.

numpy and numba at most: no torch, no Flink, no sockets. Nothing is imported here, so that each program pays
only for the modules that it names.
"""
