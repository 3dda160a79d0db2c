"""Keys of clients: who they are, what they may use and how much, and what they have used."""
