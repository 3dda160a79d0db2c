"""Anthropic's Messages API over the same chats as the OpenAI routes."""
