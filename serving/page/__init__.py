"""The front page of serving, for people: what is served, and a request ranked by hand with its reasons."""
