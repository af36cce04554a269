"""What connects Penstock with frameworks; one package each, which needs its framework and nothing else does."""
