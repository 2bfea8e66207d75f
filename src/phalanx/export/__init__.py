"""Export: a checkpoint as a file for other programs, checked against the checkpoint itself."""

import os

# onnxruntime reports to its maker unless it finds this when it is imported; whoever runs it here,
# the server too, imports this room first
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
