"""HTTP as clients see it: connections, bodies, admission, both forms of a request, errors, the document of all of it."""
