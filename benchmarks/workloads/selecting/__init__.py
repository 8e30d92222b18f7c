"""What training on less costs in quality, beside its control."""
