"""A new policy on its way from the actor to every rollout, and the test that it arrived."""
