"""All numbers that follow from a config: batches, steps, schedules, image order; without torch."""
