"""Whether a model can be fine-tuned on some devices, and how: `bigtrain fit`.

Decides: which job a name stands for; which ways of fine-tuning are compared; the peaks of loading,
training, saving and resuming; what would make a model fit.
"""
