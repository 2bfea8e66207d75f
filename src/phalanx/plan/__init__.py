"""What a config means in numbers: batches, steps, schedules and the order of images. No torch."""
