"""Roles for the tests of the launcher: processes without a model that do what a file in the run directory says. The
launcher over them is the real one.
"""
