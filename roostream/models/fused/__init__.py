"""A model's forward pass for serving: one kernel over a list of operations, in place of a module call for each.

tape.py       from a model's modules and parameters to operations and one array of weights
machine.py    the kernel that runs them, and those that lay rows and floats where it reads them
forward.py    a request's batch through both; a model that has no such list goes through its modules
"""
