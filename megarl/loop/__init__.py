"""The roles together: the only room that knows the fleet, the trainer, the tasks and the objective at once."""
