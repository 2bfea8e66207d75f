"""The client: images to a server, answers and latencies back; and a server as a child process."""
