"""A reference: a frozen policy under an instance name."""
