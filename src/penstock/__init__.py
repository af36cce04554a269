"""Penstock, a reliable event bus for Python."""
