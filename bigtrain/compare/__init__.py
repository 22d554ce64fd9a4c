"""Every strategy side by side on one job: measured, predicted, drawn."""
