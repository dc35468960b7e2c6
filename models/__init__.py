"""The ports: DFlash drafters and what they need, beside the catalogue of known pairs."""
