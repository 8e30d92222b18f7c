"""The warehouse as a source of training: a session in chunks, and whichever of session and stream is trained."""
