"""The built-in scorers: one pure function per file, named in the configuration by `kind`. `services.reward.catalog`
binds them to a component.
"""
