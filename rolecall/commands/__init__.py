"""The `rolecall` command: one file a verb; `check`, which says what a configuration means, is a folder."""
