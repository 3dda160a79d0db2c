"""The vendor's library of matrix products."""
