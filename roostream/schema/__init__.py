"""Schemas and settings: what a deployment declares, how its files are read, and the limits that everything
keeps."""
