"""The admin interface of a serving process, on its own port with its own token."""
