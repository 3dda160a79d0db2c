"""The page for browsers: chat with sessions, batches, translation, figures."""
