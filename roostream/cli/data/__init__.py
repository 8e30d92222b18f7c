"""What is told of data, and brought in: duplicates, features, a table's page, other sites' Parquet."""
