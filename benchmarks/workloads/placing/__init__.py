"""Plans and loads of tables over many owners."""
