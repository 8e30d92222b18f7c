"""How the dense part is computed, and how batches reach the device. On a CPU none of it is active."""
