"""A config's promises, tried on this machine with its own data."""
