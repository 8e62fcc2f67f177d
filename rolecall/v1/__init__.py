"""Generated stubs of proto/rolecall/v1. Made by `make proto`; never edited by hand."""
