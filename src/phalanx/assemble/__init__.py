"""Puts the other packages together: from settings to a run that trains, scores or predicts."""
