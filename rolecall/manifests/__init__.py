"""Deployments of a run, written from its settings: addresses, ports, devices, replicas and secrets agree with it by
construction.

`completed.py` fills in the settings that a place decides, `render.py` the templates in templates/, which hold what is
the same for every run and the comments that say why.
"""
