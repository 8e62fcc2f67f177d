"""What `rolecall train` does on one machine: plans the local roles, starts them, watches over them, shows the run."""
