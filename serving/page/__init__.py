"""The front page of serving: what is served, and a form that ranks a request and explains its scores."""
