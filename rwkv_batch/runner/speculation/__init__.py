"""How runners verify drafts."""
