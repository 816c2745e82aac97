"""Training: the loop, evaluation, schedules, devices, random streams."""
