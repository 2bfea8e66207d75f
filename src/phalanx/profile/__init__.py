"""What a training step spends its time on: by unit, by kernel, as a trace and as a picture."""
