"""The client: sends images to a server, and times the answers; a server as a child process."""
