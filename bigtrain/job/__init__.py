"""The configuration of a run: a typed `Job`, read from YAML files, presets and the command line.

Keys, defaults and ranges; how files and overrides are merged, and the error messages; batch
arithmetic; options of commands; imports by path (`package.module:name`); DeepSpeed files. No module
imports torch.
"""
