"""Rows from their request to their end."""
