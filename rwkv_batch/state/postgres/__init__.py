"""Sessions and documents in PostgreSQL, which several servers share."""
