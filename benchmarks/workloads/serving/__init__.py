"""Serving: a request in process and beside other ways to serve it, and the program under load.

one_request.py, batched.py, frameworks.py    in process: by stage; once or repeated; without a model
program.py, peer_program.py, overload.py     programs of their own, and a load that doesn't wait
end_to_end.py, freshness.py                  ours beside peers; how long until a score changes
"""
