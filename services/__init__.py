"""The deployables, one package per role. They import `rolecall` and never each other."""
