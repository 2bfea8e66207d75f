"""From the order of images to batches on the device."""
