"""Runs on fake tensors: a rank's peak before anything is built."""
