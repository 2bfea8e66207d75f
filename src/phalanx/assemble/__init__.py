"""The one package that knows all others: from settings to a run that trains, scores, predicts."""
