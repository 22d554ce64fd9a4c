"""One run as typed keys: YAML files, presets and the command line become a `Job`. No torch.

Keys, defaults and ranges; how files and overrides are merged, and the error messages; batch
arithmetic; options of commands; imports by path (`package.module:name`); DeepSpeed files.
"""
