"""Rows whose text is bound by a grammar."""
