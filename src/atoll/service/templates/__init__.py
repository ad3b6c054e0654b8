"""Templates, their versions, and the builds that make their images and environments."""
