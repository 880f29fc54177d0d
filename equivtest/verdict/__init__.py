"""The only place where levels and margins meet results."""
