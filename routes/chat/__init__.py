"""The text that models read and write: prompt templates, messages, tool calls, thoughts."""
