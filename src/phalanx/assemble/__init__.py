"""The one place that knows everybody: from settings to a run that trains, scores or answers."""
