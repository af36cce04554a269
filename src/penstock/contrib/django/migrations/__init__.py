"""What `manage.py migrate` does for Penstock."""
