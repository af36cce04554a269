"""One command a file, as Django wants it."""
