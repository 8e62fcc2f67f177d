"""The critic: a value model and its optimizer."""
