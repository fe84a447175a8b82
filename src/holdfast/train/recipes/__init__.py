"""The shipped recipes: the papers' configurations, and `tiny`."""
