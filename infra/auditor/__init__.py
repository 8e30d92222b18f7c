"""The books: every event is in a sample, in dead letters or pending. A program keeps count, a command looks
at all topics."""
