"""What rows share: found (inverse.py), and counted over a log (duplicates.py). RecD: docs/deduplication.md."""
