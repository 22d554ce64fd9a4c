"""Runs of other sizes than were recorded: read off two that were."""
