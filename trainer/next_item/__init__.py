"""Next-item evaluation (`roostream next-item`): a sequence model on a complete log."""
