"""Where whole, current weights come from, and whether they changed unannounced."""
