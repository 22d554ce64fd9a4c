"""A rank's peak memory before anything is built, from runs on fake tensors.

Recording a step, a stage or a model's sections; putting sections together; predicted beside
measured; the safety margin from earlier runs.
"""
