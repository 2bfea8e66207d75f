"""Which files of a folder are images, of which class and split, and what is ignored and why."""
