"""Training runs: settings, job, trainer, guard, schedule, run folder, checkpoints, evaluation."""
