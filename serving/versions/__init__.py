"""Which version scores a request: followed, held, chosen."""
