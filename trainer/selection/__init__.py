"""Training on less: which requests are trained, and whose row gradients are deferred (docs/selection.md)."""
