"""The dense part of training: optimizer, training steps, weight average, checkpoint."""
