"""What a recipe will do, before it is queued."""
