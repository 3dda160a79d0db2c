"""Which rows run, and what each of them is: its input, its draws, its text."""
