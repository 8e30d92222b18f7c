"""Logs as they are found: which one a path is, its requests in windows, other sites' Parquet of impressions as samples."""
