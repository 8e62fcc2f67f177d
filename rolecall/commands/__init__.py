"""The `rolecall` command: one file a verb, and what a configuration means before anything starts."""
