"""Every image of a set looked at: what is wrong, and what is there twice."""
