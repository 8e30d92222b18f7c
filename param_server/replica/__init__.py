"""Rows as readers have them: all, some buckets, or a cache of them; in this process, or in memory that
several share."""
