"""Export: a checkpoint as a file for other programs, checked against the checkpoint itself."""
