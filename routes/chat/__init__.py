"""The text that models read and write: prompt templates, tools, answers."""
