"""The libraries that the services share; each knows nothing of any service."""
