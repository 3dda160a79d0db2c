"""The language and the script of a text."""
