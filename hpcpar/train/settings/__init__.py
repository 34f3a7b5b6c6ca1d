"""The tables of a configuration that have variants: models, data, optimizers, schedules, losses."""
