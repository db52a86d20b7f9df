"""Simulated worlds: the services' own code on a loop, a store and a network that follow a seed."""
