"""Which files of a folder are images, with their class and split, and which are ignored."""
