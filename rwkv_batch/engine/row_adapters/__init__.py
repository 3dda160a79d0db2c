"""Adapters of running rows."""
