"""Ollama's API over the same chats and prompts as the OpenAI routes."""
