"""A rank's peak memory before anything is built, from runs on fake tensors.

Recording a step, a stage or a model's sections; composing sections; reports of predicted and
measured memory; the safety margin from earlier runs.
"""
