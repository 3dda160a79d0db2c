"""What editors ask of llama.cpp's server, and fields that Ollama has from it."""
