"""The HTTP interface: connections, request bodies, admission, routes, errors and the OpenAPI document."""
