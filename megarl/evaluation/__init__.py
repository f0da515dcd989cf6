"""How good a policy is: metrics over several responses per prompt."""
