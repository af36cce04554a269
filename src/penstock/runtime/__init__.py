"""The loops around a store: what moves events into the log when their time or their transaction has come."""
