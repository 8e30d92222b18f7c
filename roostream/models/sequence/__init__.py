"""Models of a request's history (ROO paper §3.3): history and targets in one jagged sequence.

Attention is causal, so one pass serves all candidates of a request.
"""
