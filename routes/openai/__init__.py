"""The OpenAI routes: chat completions, completions, models."""
