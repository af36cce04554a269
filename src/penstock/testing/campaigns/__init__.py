"""The campaigns that try to break the log, each with a number: `python -m penstock.testing.campaigns`."""
