"""Whether what was scored is what was logged: `roostream inspect skew`."""
