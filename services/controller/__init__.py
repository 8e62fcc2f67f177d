"""The controller: coordinates one run. See README.md."""
