"""One run as typed keys: YAML files, presets and command-line words become a `Job`. No torch.

Keys, defaults and ranges; how files and words are merged, and the complaints; batch arithmetic;
options of commands; imports by path (`package.module:name`); a DeepSpeed JSON against the job.
"""
