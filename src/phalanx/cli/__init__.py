"""The command line; whatever is heavy is imported only when a command runs."""
