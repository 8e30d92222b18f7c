"""How much of everything a deployment needs, and which owner its rows would have: `roostream plan`, `roostream placement`."""
