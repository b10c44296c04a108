"""One step: gradients are taken from backward, reduced, judged, and the optimizer's update is made and published."""
