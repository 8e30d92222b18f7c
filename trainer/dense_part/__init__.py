"""The dense part of training: its weights, the steps that they take, their average, and their file."""
