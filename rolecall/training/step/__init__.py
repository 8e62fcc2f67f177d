"""One optimizer step of a role on its ranks: reading the rows, sharing them out, updating."""
