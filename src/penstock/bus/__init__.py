"""The application's API: topics, publishing, reading."""
