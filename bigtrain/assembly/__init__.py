"""From a job to a plan to a runner: the order of composition."""
