"""Small workers that tests launch: each is called with the run's folder and its rank."""
