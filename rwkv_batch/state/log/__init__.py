"""The database: the token log, sessions, and documents."""
