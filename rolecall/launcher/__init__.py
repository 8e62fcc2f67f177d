"""The launcher, `rolecall train` on one machine: plans the local roles, starts them, watches and shows the run."""
