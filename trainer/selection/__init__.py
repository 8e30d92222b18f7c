"""Training on less: which requests are trained (docs/selection.md), and which rows' gradients wait."""
