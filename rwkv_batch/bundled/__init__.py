"""The model that runs where no other is named: its file and the texts beside it."""
