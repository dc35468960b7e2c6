"""The HTTP endpoint: one file per dialect, all readers of the same events; one thread owns MLX."""
