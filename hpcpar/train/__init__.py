"""Training: typed configuration, the trainer, metrics and plots."""
