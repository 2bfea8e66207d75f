"""Where a training step spends its time: by unit, by kernel, as a trace and as a picture."""
