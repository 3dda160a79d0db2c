"""A SQLite file: whose it is, its tables, and what is left of a damaged one."""
