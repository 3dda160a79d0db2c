"""Who sends requests: what each may use of the engine, and what it has used."""
