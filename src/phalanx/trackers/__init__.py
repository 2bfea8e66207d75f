"""Trackers: TensorBoard, Weights & Biases and MLflow, each fed by its own process.

A run writes its records whether it is tracked or not. The process of a tracker reads them as they
grow, and logs what the tracker does not have yet. So a tracker that is slow, fails or hangs does
not affect the run, misses nothing, and logs nothing twice.
"""
