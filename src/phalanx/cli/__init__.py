"""The command line: one file per command; whatever is heavy is imported only when it runs."""
