"""Images from files to batches; only three files of loading import torch, and workers never do."""
