"""OpenAI's Responses API: responses that are stored, continued, listed and deleted."""
