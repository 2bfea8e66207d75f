"""Export: a checkpoint as a file for other programs, checked against the checkpoint itself."""

import os

# onnxruntime sends telemetry unless this is set when it is imported; everything here that runs it,
# including the server, imports this package first
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
