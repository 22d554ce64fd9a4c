"""Who this process is, how ranks meet, how one failure ends all."""
