"""The document that describes all routes, and a page of it."""
