"""What benchmarks of the warehouse read and write."""
