"""What watches a training from outside: metrics, profiles, reports, diagnosis. Nothing of the nine rooms imports it."""
