"""Commands about data: duplicates, features, warehouse tables and sessions, and imports from other sites."""
