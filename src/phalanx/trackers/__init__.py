"""Trackers: TensorBoard, Weights & Biases and MLflow, each fed by a process of its own.

A run writes its records whether anybody tracks it or not. The process of a tracker reads them as
they grow, and hands on what the tracker has not been told yet. So a tracker that is slow, fails or
hangs takes nothing from the run, misses nothing, and tells nothing twice.
"""
