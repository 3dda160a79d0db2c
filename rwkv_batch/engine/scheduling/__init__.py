"""Which sequences run, and what each of them is: its prompt, its text, its turn of a session."""
