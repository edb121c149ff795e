"""A training run: settings, job, trainer, guard, run folder, checkpoints."""
