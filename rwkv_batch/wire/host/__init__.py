"""The wire where a host has several engines."""
